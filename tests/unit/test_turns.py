"""Whose job is fed next."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from storage.turns import Contender, in_turn


def order(contenders: list[Contender], jobs: dict[str, int], number: int = 99) -> list[str]:
    """The batches of the first jobs, as `batch` or `batch+batch`."""
    waiting = {batch_id: iter([batch_id] * count) for batch_id, count in jobs.items()}
    return [item for item, _ in zip(in_turn(contenders, waiting.__getitem__), range(number), strict=False)]


def test_urgent_batches_come_first_and_peers_take_turns() -> None:
    contenders = [Contender("late", 5, 0, 2.0), Contender("early", 5, 0, 1.0), Contender("urgent", 0, 9, 3.0)]
    jobs = {"late": 2, "early": 3, "urgent": 2}
    assert order(contenders, jobs) == ["urgent", "urgent", "early", "late", "early", "late", "early"]


def test_who_has_the_fewest_jobs_in_flight_begins() -> None:
    contenders = [Contender("a", 5, 7, 1.0), Contender("b", 5, 0, 2.0), Contender("c", 5, 3, 3.0)]
    assert order(contenders, {"a": 1, "b": 1, "c": 1}) == ["b", "c", "a"]


def test_an_owner_with_many_batches_has_no_larger_share_than_one_with_a_single_one() -> None:
    many = [Contender(f"m{number}", 5, 0, float(number), "many") for number in range(3)]
    jobs = {"m0": 2, "m1": 2, "m2": 2, "one": 3}
    fed = order([*many, Contender("one", 5, 0, 9.0, "single")], jobs)
    assert fed == ["m0", "one", "m1", "one", "m2", "one", "m0", "m1", "m2"]


def test_no_job_is_read_before_its_turn() -> None:
    def waiting(batch_id: str) -> Iterator[str]:
        assert batch_id == "urgent", "the other one's turn never came"
        yield batch_id

    first = next(in_turn([Contender("usual", 5, 0, 1.0), Contender("urgent", 0, 0, 2.0)], waiting))
    assert first == "urgent"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.sampled_from("xyz"), st.integers(0, 4)), max_size=8))
def test_every_job_is_fed_once_and_none_before_a_more_urgent_one(batches: list[tuple[int, int, str, int]]) -> None:
    contenders = [
        Contender(str(n), priority, in_flight, 1.0, owner) for n, (priority, in_flight, owner, _) in enumerate(batches)
    ]
    jobs = {str(n): count for n, (*_, count) in enumerate(batches)}
    fed = order(contenders, jobs, 1000)
    assert sorted(fed) == sorted(batch_id for batch_id, count in jobs.items() for _ in range(count))
    priorities = [batches[int(batch_id)][0] for batch_id in fed]
    assert priorities == sorted(priorities)
