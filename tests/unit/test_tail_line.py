"""Which of the frames that wait the tail works on next."""

from __future__ import annotations

from collections.abc import Sequence

from relay.messages import Draft, Prefill, Release, Round, Sampling, Tensor
from relay.transport import Received
from workers.tail.line import MAX_MERGED, Frame, Line

HIDDEN = Tensor("float32", (1, 1), bytes(4))


def a_round(number: int, slots: Sequence[int], draft: int = 0) -> Round:
    return Round(number, tuple(Draft(slot, 0, 1, 3, 5, (1,) * draft) for slot in slots), HIDDEN)


def a_chunk(number: int) -> Prefill:
    return Prefill(number, 9, 0, 0, 0, 1, False, Sampling(0.0, 0, 1.0, 0.0, 0), None, HIDDEN)


def line_of(*frames: Frame) -> Line:
    line = Line()
    for frame in frames:
        line.put(Received(0, frame, 10, 0.0))
    return line


def taken(line: Line) -> list[list[int]]:
    """The numbers of the frames as they are worked on; those run as one stand together."""
    groups = []
    while line:
        group = line.take()
        groups.append([received.message.number for received in (group if isinstance(group, list) else [group])])
    return groups


def test_rounds_that_wait_together_run_as_one() -> None:
    assert taken(line_of(a_round(1, [0, 1]), a_round(2, [2]), a_round(3, [3]))) == [[1, 2, 3]]


def test_a_slot_stands_in_one_of_them_only() -> None:
    assert taken(line_of(a_round(1, [0]), a_round(2, [1]), a_round(1, [0]), a_round(3, [2]))) == [[1, 2], [1, 3]]


def test_rounds_and_prefill_take_turns() -> None:
    line = line_of(a_chunk(1), a_round(2, [0]), a_chunk(3), a_round(4, [1]), Release(5, 8, 0, 1))
    assert taken(line) == [[2, 4], [1], [3], [5]]
    line = line_of(a_chunk(1), a_chunk(2), a_round(3, [0]), a_round(4, [0]))
    assert taken(line) == [[3], [1], [4], [2]]


def test_what_runs_as_one_stays_within_a_size() -> None:
    rows = list(range(MAX_MERGED // 20))
    line = line_of(a_round(1, rows, draft=9), a_round(2, [900], draft=9), a_round(3, [901], draft=19))
    assert taken(line) == [[1, 2], [3]]
