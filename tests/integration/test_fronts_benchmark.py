"""The benchmark of the fronts does what it says. How fast is for `make bench` to find out."""

from __future__ import annotations

from benchmarks.fronts import Setup, measure


def test_every_slot_gets_filled_and_every_short_job_recorded_far_from_the_queue_server() -> None:
    figures = measure(Setup(rtt_ms=30.0, fronts=2, slots=4, jobs=12, job_s=0.05))
    assert 0 < figures.fill_s < 60
    assert figures.jobs_per_s > 0
    assert figures.cpu_s_per_job >= 0
    assert figures.front_mb > 1
