"""The engine's registry of live and finished tasks."""

from __future__ import annotations

import threading

from workers.head.registry import Registry


def test_only_the_first_delivery_of_a_task_is_new() -> None:
    registry: Registry[str] = Registry()
    assert registry.join("job.1", "a").new
    assert not registry.join("job.1", "b").new
    assert registry.waiting("job.1") == ["a", "b"]


def test_everyone_who_joined_hears_of_the_end() -> None:
    registry: Registry[str] = Registry()
    registry.join("job.1", "a")
    registry.join("job.1", "b")
    assert registry.finish("job.1", b"text") == ["a", "b"]
    assert registry.live() == ()


def test_a_delivery_after_the_end_gets_the_outcome() -> None:
    registry: Registry[str] = Registry()
    registry.join("job.1", "a")
    registry.finish("job.1", b"text")
    joined = registry.join("job.1", "b")
    assert joined.finished == b"text"
    assert not joined.new


def test_a_waiter_that_joins_twice_is_told_once() -> None:
    registry: Registry[str] = Registry()
    registry.join("job.1", "a")
    registry.join("job.1", "a")
    assert registry.finish("job.1", b"text") == ["a"]


def test_a_late_joiner_learns_that_the_job_has_started() -> None:
    registry: Registry[str] = Registry()
    assert not registry.join("job.1", "a").started
    assert registry.start("job.1") == ["a"]
    assert registry.join("job.1", "b").started


def test_a_task_stays_live_when_its_waiter_leaves() -> None:
    registry: Registry[str] = Registry()
    registry.join("job.1", "a")
    registry.leave("a")
    assert registry.live() == ("job.1",)
    assert not registry.join("job.1", "b").new
    assert registry.finish("job.1", b"text") == ["b"]


def test_a_dropped_task_is_new_again() -> None:
    registry: Registry[str] = Registry()
    registry.join("job.1", "a")
    assert registry.drop("job.1") == ["a"]
    assert registry.join("job.1", "a").new


def test_unknown_tasks_are_nobodys_business() -> None:
    registry: Registry[str] = Registry()
    assert registry.start("job.1") == []
    assert registry.waiting("job.1") == []
    assert registry.drop("job.1") == []


def test_the_oldest_outcomes_are_forgotten_first() -> None:
    registry: Registry[str] = Registry(max_finished=2)
    for name in ("one", "two", "three"):
        registry.finish(name, b"x")
    assert registry.join("one", "a").new
    assert registry.join("two", "a").finished == b"x"
    assert registry.join("three", "a").finished == b"x"


def test_outcomes_are_bounded_in_bytes() -> None:
    registry: Registry[str] = Registry(max_finished_bytes=100)
    registry.finish("one", b"x" * 60)
    registry.finish("two", b"x" * 60)
    assert registry.join("one", "a").new
    assert registry.join("two", "a").finished is not None


def test_an_outcome_too_large_to_keep_is_still_delivered() -> None:
    registry: Registry[str] = Registry(max_finished_bytes=10)
    registry.join("one", "a")
    assert registry.finish("one", b"x" * 60) == ["a"]
    assert registry.join("one", "a").new


def test_the_first_outcome_stands() -> None:
    registry: Registry[str] = Registry()
    registry.finish("one", b"first")
    registry.finish("one", b"second")
    assert registry.join("one", "a").finished == b"first"


def test_of_many_deliveries_at_once_exactly_one_is_new() -> None:
    registry: Registry[int] = Registry()
    start = threading.Barrier(8)
    new: list[int] = []

    def deliver(front: int) -> None:
        start.wait()
        new.extend(job for job in range(200) if registry.join(str(job), front).new)

    threads = [threading.Thread(target=deliver, args=(front,)) for front in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(new) == list(range(200))
