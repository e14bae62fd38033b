"""The soak's verdicts: flat and growing memory, equal and falling pace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.soak import DRAIN, RAMP, Growth, Pace, Sample, Soak, growths, paces

#: seconds between two samples here
STEP_S = 2.0


def samples(resident_mb: Sequence[float], cpu_per_s: float = 1.0, name: str = "head") -> list[Sample]:
    return [Sample(STEP_S * n, {name: mb}, cpu_per_s * STEP_S * n) for n, mb in enumerate(resident_mb)]


def test_memory_that_stays_is_flat() -> None:
    (growth,) = growths(samples([500.0] * 100), since=0.0)
    assert growth == Growth("head", 500.0, 500.0)
    assert growth.is_flat


def test_memory_that_grows_all_the_time_is_not_flat() -> None:
    (growth,) = growths(samples([100.0 + 0.1 * n for n in range(100)]), since=0.0)
    assert growth.end_mb - growth.begin_mb == pytest.approx(9.0)
    assert not growth.is_flat


def test_what_grows_during_the_warm_up_only_is_flat() -> None:
    (growth,) = growths(samples([100.0 + 5 * min(n, 20) for n in range(100)]), since=STEP_S * 20)
    assert growth.is_flat


def test_one_high_sample_is_no_growth() -> None:
    (growth,) = growths(samples([100.0] * 99 + [400.0]), since=0.0)
    assert growth.is_flat


def test_a_process_that_came_later_is_left_out() -> None:
    mixed = [*samples([100.0] * 10), Sample(99.0, {"head": 100.0, "front": 50.0}, 99.0)]
    assert [growth.process for growth in growths(mixed, since=0.0)] == ["head"]


def ended(first_rate: float, last_rate: float, count: int = 500) -> list[float]:
    """Times of `count` jobs: at one rate for the first half, at another for the second."""
    times, now = [], 0.0
    for number in range(count):
        now += 1 / (first_rate if number < count // 2 else last_rate)
        times.append(now)
    return times


def test_paces_are_those_of_the_first_and_of_the_last_window_without_ramp_and_drain() -> None:
    times = ended(10.0, 5.0, count=RAMP + DRAIN + 500)
    first, last = paces(times, samples([100.0] * 100), window=150)
    assert first.jobs_per_s == pytest.approx(10.0)
    assert last.jobs_per_s == pytest.approx(5.0)


def test_processor_time_per_job_is_taken_between_the_windows_ends() -> None:
    times = ended(10.0, 10.0, count=RAMP + DRAIN + 400)
    first, last = paces(times, samples([100.0] * 100, cpu_per_s=2.0), window=100)
    assert first.cpu_s_per_job == pytest.approx(0.2)
    assert last.cpu_s_per_job == pytest.approx(0.2)


def test_too_few_jobs_for_two_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        paces(ended(10.0, 10.0, count=RAMP + DRAIN + 199), samples([1.0] * 10), window=100)


@pytest.mark.parametrize(
    ("last_rate", "end_mb", "passed"),
    [(10.0, 100.0, True), (9.0, 100.0, False), (11.0, 100.0, False), (10.0, 110.0, False)],
)
def test_a_soak_passes_only_with_flat_memory_and_an_equal_pace(last_rate: float, end_mb: float, passed: bool) -> None:
    soak = Soak(5000, 500.0, [Growth("head", 100.0, end_mb)], Pace(10.0, 0.1), Pace(last_rate, 0.1))
    assert soak.passed is passed
    assert soak.report().endswith("passed" if passed else "FAILED")
    assert ("GROWS" in soak.report()) is (end_mb > 104.0)
