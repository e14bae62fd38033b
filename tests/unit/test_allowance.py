"""How many jobs may run after there was no memory for as many."""

from __future__ import annotations

from workers.head.allowance import RAISE_AFTER_S, Allowance


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_lack_of_memory_halves_what_ran_and_one_job_always_may() -> None:
    allowance = Allowance(16, Clock())
    assert allowance.most == 16
    assert [allowance.fell_short(running) for running in (16, 8, 4, 2, 1, 1)] == [8, 4, 2, 1, 1, 1]
    assert allowance.most == 1


def test_fewer_jobs_than_were_allowed_are_what_did_not_fit() -> None:
    allowance = Allowance(16, Clock())
    assert allowance.fell_short(5) == 2


def test_after_a_while_without_trouble_more_may_run_up_to_all() -> None:
    clock = Clock()
    allowance = Allowance(16, clock)
    allowance.fell_short(16)
    seen = []
    for _ in range(5):
        clock.now += RAISE_AFTER_S - 1
        seen.append(allowance.most)
        clock.now += 1
        seen.append(allowance.most)
    assert seen == [8, 10, 10, 12, 12, 15, 15, 16, 16, 16]


def test_another_lack_of_memory_begins_the_wait_anew() -> None:
    clock = Clock()
    allowance = Allowance(4, clock)
    allowance.fell_short(4)
    clock.now += RAISE_AFTER_S - 1
    allowance.fell_short(2)
    clock.now += RAISE_AFTER_S - 1
    assert allowance.most == 1
    clock.now += 1
    assert allowance.most == 2
