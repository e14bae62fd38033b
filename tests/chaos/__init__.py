"""A campaign of faults against a whole system of real processes: see docs/chaos.md."""
