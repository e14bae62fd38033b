"""Measurements; `make bench` runs `benchmarks.batch`."""
