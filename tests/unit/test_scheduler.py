"""Which job gets which slot, which chunk goes next, and whose prefix it copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relay.messages import Sampling
from tasks.generation import GenerationRequest, GenerationTask
from workers.head.jobs import Job
from workers.head.prefixes import MIN_COPY, MIN_WAIT, common_length
from workers.head.scheduler import LANE_CREDIT, SLOT_CREDIT, Chunk, Scheduler
from workers.head.slots import HeadSlot, Phase

SYSTEM = list(range(100, 160))
CHUNK = 64


def job(name: str, tokens: Sequence[int], *, suspect: bool = False) -> Job:
    task = GenerationTask(name, 1, "batch", name, "m", GenerationRequest("x", None, 0))
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0)
    return Job(task, sampling, None, list(tokens), len(tokens), 8, suspect=suspect)  # type: ignore[arg-type]


def scheduler(slots: int = 2, *, lanes: int = 2, prefix_reuse: bool = True) -> Scheduler:
    return Scheduler(slots=slots, lanes=lanes, prefix_reuse=prefix_reuse)


def admitted(scheduler: Scheduler, *jobs: Job) -> list[HeadSlot]:
    for each in jobs:
        scheduler.submit(each)
    return list(scheduler.admit())


def sent(chunk: Chunk | None) -> Chunk:
    """The chunk, as the engine sends it."""
    assert chunk is not None
    return chunk


def answered(scheduler: Scheduler, chunk: Chunk) -> None:
    """The tail applied the chunk; a last one's slot decodes."""
    slot = chunk.slot
    slot.answered(min(slot.awaited))
    slot.hold(chunk.start + chunk.length)
    if chunk.last:
        scheduler.decode(slot)


def prefilled(scheduler: Scheduler, *jobs: Job) -> list[HeadSlot]:
    """Slots that decode these jobs."""
    slots = admitted(scheduler, *jobs)
    while (chunk := scheduler.next_chunk(CHUNK)) is not None:
        answered(scheduler, sent(chunk))
    assert all(slot.phase is Phase.DECODE for slot in slots)
    return slots


def test_jobs_get_slots_in_the_order_in_which_they_came() -> None:
    line = scheduler(2)
    first, second, third = (job(name, [1]) for name in "abc")
    assert [slot.job for slot in admitted(line, first, second, third)] == [first, second]
    assert line.num_waiting == 1
    line.free(line.slots[1])
    assert [slot.job for slot in line.admit()] == [third]


def test_a_prompt_is_prefilled_in_chunks_of_which_only_so_many_are_under_way() -> None:
    line = scheduler(2)
    first, second = admitted(line, job("a", range(40)), job("b", range(100, 104)))
    chunks = [sent(line.next_chunk(4)) for _ in range(SLOT_CREDIT)]
    assert {chunk.slot for chunk in chunks} == {first}
    assert sent(line.next_chunk(4)).slot is second
    assert line.next_chunk(4) is None
    answered(line, chunks[0])
    chunks += [sent(line.next_chunk(4))]
    assert [(chunk.start, chunk.length) for chunk in chunks] == [(4 * number, 4) for number in range(9)]
    assert not any(chunk.last for chunk in chunks)


def test_no_more_chunks_are_under_way_on_a_lane_than_its_stream_keeps() -> None:
    line = scheduler(6, lanes=2)
    admitted(line, *(job(name, range(index * 100, index * 100 + 40)) for index, name in enumerate("abcdef")))
    lanes = []
    while (chunk := line.next_chunk(4)) is not None:
        lanes.append(line.prefill_lane(sent(chunk).slot))
    assert [lanes.count(0), lanes.count(1)] == [LANE_CREDIT, LANE_CREDIT]


@pytest.mark.parametrize("length", [0, 1, MIN_COPY - 1, MIN_COPY, 40, 59, 60])
def test_the_common_length_is_that_of_the_common_prefix_unless_it_is_not_worth_it(length: int) -> None:
    other = [*SYSTEM[:length], 7, *SYSTEM[length + 1 :]]
    assert common_length(SYSTEM, other, len(SYSTEM)) == (length if length >= MIN_COPY else 0)
    assert common_length(SYSTEM, SYSTEM, 20) == 20


def test_what_a_running_job_holds_is_copied_up_to_the_last_token() -> None:
    line = scheduler(2)
    (source,) = prefilled(line, job("a", [*SYSTEM, 1, 2]))
    admitted(line, job("b", SYSTEM))
    chunk = sent(line.next_chunk(CHUNK))
    assert chunk.copy == (source, len(SYSTEM) - 1)
    assert (chunk.start, chunk.length, chunk.last) == (len(SYSTEM) - 1, 1, True)


def test_a_short_common_prefix_is_computed_again() -> None:
    line = scheduler(2)
    prefilled(line, job("a", SYSTEM))
    admitted(line, job("b", [*SYSTEM[: MIN_COPY - 1], 1, 2]))
    assert sent(line.next_chunk(CHUNK)).copy is None


def test_without_prefix_reuse_nothing_is_copied() -> None:
    line = scheduler(2, prefix_reuse=False)
    prefilled(line, job("a", SYSTEM))
    admitted(line, job("b", SYSTEM))
    assert sent(line.next_chunk(CHUNK)).copy is None


def test_a_job_goes_where_its_prefix_lies_and_needs_no_copy_from_elsewhere() -> None:
    line = scheduler(3)
    slots = prefilled(line, job("a", range(50)), job("b", SYSTEM), job("c", range(200, 250)))
    for slot in slots:
        line.free(slot)
    (slot,) = admitted(line, job("d", [*SYSTEM[:30], 1]))
    assert slot is slots[1]
    assert sent(line.next_chunk(CHUNK)).copy == (slot, 30)


def test_a_job_without_a_prefix_takes_the_slot_that_was_of_use_longest_ago() -> None:
    line = scheduler(3)
    slots = prefilled(line, job("a", range(50)), job("b", SYSTEM), job("c", range(200, 250)))
    for slot in (slots[2], slots[0], slots[1]):
        line.free(slot)
    (slot,) = admitted(line, job("d", range(300, 340)))
    assert slot is slots[2]


def test_a_job_waits_for_a_prefix_that_is_being_prefilled_and_then_copies_it() -> None:
    line = scheduler(2)
    source, waiting = admitted(line, job("a", [*SYSTEM, 1]), job("b", [*SYSTEM, 2]))
    first = sent(line.next_chunk(32))
    rest = sent(line.next_chunk(32))
    assert (first.slot, rest.slot, line.next_chunk(32)) == (source, source, None)
    answered(line, first)
    assert line.next_chunk(32) is None
    answered(line, rest)
    chunk = sent(line.next_chunk(32))
    assert (chunk.slot, chunk.copy, chunk.length) == (waiting, (source, len(SYSTEM)), 1)


def test_a_job_does_not_wait_for_a_prefix_that_spares_little() -> None:
    line = scheduler(2)
    _, second = admitted(line, job("a", SYSTEM), job("b", [*SYSTEM[: MIN_WAIT - 1], 2]))
    sent(line.next_chunk(CHUNK))
    chunk = sent(line.next_chunk(CHUNK))
    assert (chunk.slot, chunk.copy) == (second, None)


def test_a_job_stops_waiting_when_the_other_one_ends_before_its_prefix_stands() -> None:
    line = scheduler(2)
    source, waiting = admitted(line, job("a", [*SYSTEM, 1]), job("b", [*SYSTEM, 2]))
    sent(line.next_chunk(32))
    assert sent(line.next_chunk(32)).slot is source
    line.free(source)
    chunk = sent(line.next_chunk(32))
    assert (chunk.slot, chunk.copy) == (waiting, None)


def test_a_slot_whose_prefix_is_being_copied_begins_no_other_generation_before_the_answer() -> None:
    line = scheduler(2)
    (source,) = prefilled(line, job("a", [*SYSTEM, 1]))
    admitted(line, job("b", [*SYSTEM, 2]))
    copying = sent(line.next_chunk(CHUNK))
    line.free(source)
    (slot,) = admitted(line, job("c", range(40)))
    assert slot is source
    assert line.next_chunk(CHUNK) is None
    answered(line, copying)
    assert sent(line.next_chunk(CHUNK)).slot is source


def test_after_a_void_row_a_job_is_prefilled_plainly() -> None:
    line = scheduler(2)
    prefilled(line, job("a", [*SYSTEM, 1]))
    (slot,) = admitted(line, job("b", [*SYSTEM, 2]))
    assert sent(line.next_chunk(CHUNK)).copy is not None
    assert slot.job is not None
    slot.job.restarts += 1
    line.restart(slot)
    chunk = sent(line.next_chunk(CHUNK))
    assert (chunk.slot, chunk.start, chunk.copy) == (slot, 0, None)


def test_in_a_new_epoch_nothing_can_be_copied_until_it_was_prefilled_again() -> None:
    line = scheduler(3)
    prefilled(line, job("a", [*SYSTEM, 1]))
    line.forget_held()
    admitted(line, job("b", [*SYSTEM, 2]))
    assert sent(line.next_chunk(CHUNK)).copy is None


def test_rows_wait_for_their_round_in_the_order_in_which_they_became_ready() -> None:
    line = scheduler(3)
    first, second, third = prefilled(line, job("a", [1]), job("b", [2]), job("c", [3]))
    assert line.ready_rows() == [first, second, third]
    line.depart(first)
    line.decode(first)
    assert line.ready_rows() == [second, third, first]
    line.free(third)
    assert (line.ready_rows(), line.num_rows) == ([second, first], 2)


def test_a_suspect_begins_in_an_empty_engine_only_and_nothing_begins_beside_it() -> None:
    line = scheduler(3)
    first, suspect, last = job("a", [1]), job("b", [2], suspect=True), job("c", [3])
    (running,) = admitted(line, first, suspect, last)
    assert running.job is first
    assert line.has_suspect
    assert admitted(line) == []
    line.free(running)
    (alone,) = admitted(line)
    assert alone.job is suspect
    assert admitted(line) == []
    line.free(alone)
    assert not line.has_suspect
    assert [slot.job for slot in admitted(line)] == [last]


def test_jobs_ahead_of_a_suspect_begin_before_it() -> None:
    line = scheduler(3)
    first, second, suspect = job("a", [1]), job("b", [2]), job("c", [3], suspect=True)
    assert [slot.job for slot in admitted(line, first, second, suspect)] == [first, second]


def test_the_line_is_cleared_for_a_suspect_that_is_next_or_runs_and_for_nobody_else() -> None:
    line = scheduler(1)
    first, second, suspect, third = job("a", [1]), job("b", [2]), job("c", [3], suspect=True), job("d", [4])
    (slot,) = admitted(line, first, second, suspect, third)
    assert line.clear_for_suspect() == []
    line.withdraw("b.1")
    assert line.clear_for_suspect() == ["d.1"]
    line.free(slot)
    assert [slot.job for slot in admitted(line, second)] == [suspect]
    assert line.clear_for_suspect() == ["b.1"]
    assert line.num_waiting == 0


def test_a_suspects_choices_run_beside_each_other_and_stay_in_line_when_it_is_cleared() -> None:
    line = scheduler(2)
    choices, other = [job("a", [1], suspect=True) for _ in range(3)], job("b", [2])
    assert [slot.job for slot in admitted(line, *choices, other)] == choices[:2]
    assert line.clear_for_suspect() == ["b.1"]
    line.free(line.slots[0])
    assert [slot.job for slot in admitted(line)] == [choices[2]]
    assert line.has_suspect
    for slot in line.live():
        line.free(slot)
    assert not line.has_suspect


def test_a_tasks_jobs_are_found_in_their_slots_and_taken_out_of_the_line() -> None:
    line = scheduler(2)
    slots = admitted(line, job("a", [1]), job("a", [1]), job("a", [1]), job("b", [2]))
    assert (line.holding("a.1"), line.holding("b.1")) == (slots, [])
    line.withdraw("a.1")
    assert (line.holding("a.1"), line.num_waiting) == (slots, 1)
    for _ in range(2):
        line.withdraw("b.1")
    assert line.num_waiting == 0
