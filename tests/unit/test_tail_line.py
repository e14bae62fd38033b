"""Which of the frames that wait the tail works on next."""

from __future__ import annotations

from collections.abc import Sequence

from relay.messages import Copy, Draft, Prefill, Release, Round, Sampling, Tensor
from relay.transport import Received
from workers.tail.line import MAX_MERGED, Frame, Line

HIDDEN = Tensor("float32", (1, 1), bytes(4))


def a_round(number: int, slots: Sequence[int], draft: int = 0) -> Round:
    return Round(number, tuple(Draft(slot, 0, 1, 3, 5, (1,) * draft) for slot in slots), HIDDEN)


def a_chunk(number: int, slot: int = 9, length: int = 1, copy: Copy | None = None) -> Prefill:
    hidden = Tensor("float32", (length, 1), bytes(4 * length))
    return Prefill(number, slot, 0, 0, 0, 1, False, Sampling(0.0, 0, 1.0, 0.0, 0), copy, hidden)


def line_of(*frames: Frame) -> Line:
    line = Line()
    for frame in frames:
        line.put(Received(0, frame, 10, 0.0))
    return line


def taken(line: Line) -> list[list[int]]:
    """The numbers of the frames as they are worked on; those run as one stand together."""
    groups = []
    while line:
        groups.append([received.message.number for received in line.take()])
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


def test_chunks_of_different_slots_run_as_one_unless_that_were_mostly_padding() -> None:
    assert taken(line_of(a_chunk(1, 0), a_chunk(2, 1), a_chunk(3, 0), a_chunk(4, 2))) == [[1, 2], [3, 4]]
    assert taken(line_of(*(a_chunk(slot, slot, length) for slot, length in enumerate((30, 20, 2, 2))))) == [
        [0, 1, 2],
        [3],
    ]
    most = MAX_MERGED // 256
    line = line_of(*(a_chunk(number, number, 256) for number in range(most + 1)))
    assert taken(line) == [list(range(most)), [most]]


def test_a_prefix_is_copied_before_others_are_computed_and_its_source_is_left_alone() -> None:
    copying = a_chunk(2, 1, copy=Copy(0, 0, 5))
    assert taken(line_of(a_chunk(1, 0), copying, a_chunk(3, 2), a_chunk(4, 0))) == [[1], [2, 3], [4]]
    assert taken(line_of(a_chunk(1, 0), Release(2, 1, 0, 1), a_chunk(3, 2))) == [[1], [2], [3]]
