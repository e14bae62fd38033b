"""Which job sits in which slot, and what its slot does next. No torch, no I/O.

A slot works on one *generation* at a time: prefill in chunks, then rounds. A generation is begun anew, from the
job's committed tokens, whenever the tail's state may differ from ours (a new epoch, a void row).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.head.jobs import Job
from workers.head.prefixes import Match, best_match, held_match, worth_waiting_for
from workers.head.slots import NOTHING_HELD, HeadSlot, Phase

#: prefill chunks of a slot in flight at once; below the answers that the tail stores
SLOT_CREDIT = 8
#: and on a lane: below the entries that a stream keeps
LANE_CREDIT = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a slot's prefill."""

    slot: HeadSlot
    generation: int
    #: number of the row; its answer is awaited from here on
    round: int
    start: int
    length: int
    last: bool
    #: the prefix in front of `start`, for a first chunk that does not start at 0
    copy: Match | None
    #: the generation that holds that prefix at its source, which may be this slot's last one
    copied: int | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the slot is still about it."""
        return self.slot.awaits(self.generation, self.round)


class Scheduler:
    """Slots and the line of waiting jobs, first come first served."""

    def __init__(self, *, slots: int, lanes: int, prefix_reuse: bool) -> None:
        self.slots = [HeadSlot(index) for index in range(slots)]
        #: slots of `slots` that both halves have
        self._num_shared = slots
        self._num_lanes = lanes
        self._prefix_reuse = prefix_reuse
        self._waiting: deque[Job] = deque()
        #: slots with chunks to send, in the order in which they began
        self._prefilling: deque[HeadSlot] = deque()
        #: slots that decode and wait for a round, the one that has waited longest first
        self._ready: dict[HeadSlot, None] = {}
        self._count = 0

    # -- jobs -------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Put a job at the end of the line."""
        self._waiting.append(job)

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Put jobs that lost their slots at the head of the line, in this order."""
        self._waiting.extendleft(reversed(jobs))

    def share(self, num_slots: int) -> list[HeadSlot]:
        """Use the first `num_slots` slots only; returns the others that hold a job."""
        self._num_shared = num_slots
        return [slot for slot in self.live() if slot.index >= num_slots]

    def admit(self, most: int | None = None) -> Iterator[HeadSlot]:
        """Give waiting jobs the free slots, yielding each slot as it starts. A suspect shares with no other task.

        No job begins beside `most` others.
        """
        while self._may_begin_next() and (free := self._free(most)):
            job = self._waiting.popleft()
            slot = self._choose(job, free)
            slot.job = job
            self._begin(slot)
            yield slot

    def restart(self, slot: HeadSlot) -> None:
        """Begin a new generation of the slot's job; what the tail holds there is not known."""
        slot.held = NOTHING_HELD
        self._begin(slot)

    def free(self, slot: HeadSlot) -> Job:
        """Take the slot's job out; answers still on their way no longer match the slot."""
        job = slot.job
        assert job is not None
        slot.job, slot.phase, slot.source, slot.promise = None, Phase.FREE, None, None
        slot.awaited.clear()
        self._ready.pop(slot, None)
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        self._use(slot)
        return job

    def forget_held(self) -> None:
        """The tail's caches are empty."""
        for slot in self.slots:
            slot.held = NOTHING_HELD

    def live(self) -> list[HeadSlot]:
        """The slots with a job."""
        return [slot for slot in self.slots if slot.job is not None]

    def holding(self, task_id: str) -> list[HeadSlot]:
        """The slots with this task's jobs."""
        return [slot for slot in self.slots if slot.job is not None and slot.job.task_id == task_id]

    def withdraw(self, task_id: str) -> None:
        """Take this task's jobs out of the line."""
        self._waiting = deque(job for job in self._waiting if job.task_id != task_id)

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect runs, or is the next to run: nothing else begins before it has ended."""
        return self._suspect_runs() or bool(self._waiting and self._waiting[0].suspect)

    def clear_for_suspect(self) -> list[str]:
        """Empty the line for a suspect, its own jobs apart; the ids of the tasks that stood in it, in order."""
        if not self.has_suspect:
            return []
        running = (slot.job for slot in self.slots if slot.job is not None and slot.job.suspect)
        suspect = next(running, None) or self._waiting[0]
        cleared = dict.fromkeys(job.task_id for job in self._waiting if job.task_id != suspect.task_id)
        for task_id in cleared:
            self.withdraw(task_id)
        return list(cleared)

    @property
    def num_waiting(self) -> int:
        """Jobs without a slot."""
        return len(self._waiting)

    def _free(self, most: int | None) -> list[HeadSlot]:
        """The free slots; none where `most` jobs run."""
        if most is not None and len(self.live()) >= most:
            return []
        return [slot for slot in self.slots[: self._num_shared] if slot.phase is Phase.FREE]

    def _may_begin_next(self) -> bool:
        if not self._waiting:
            return False
        following = self._waiting[0]
        if not (following.suspect or self._suspect_runs()):
            return True
        return len(self.live()) == len(self.holding(following.task_id))

    def _suspect_runs(self) -> bool:
        return any(slot.job is not None and slot.job.suspect for slot in self.slots)

    def _begin(self, slot: HeadSlot) -> None:
        slot.begin()
        self._ready.pop(slot, None)
        if slot not in self._prefilling:
            self._prefilling.append(slot)

    def _choose(self, job: Job, free: list[HeadSlot]) -> HeadSlot:
        """The slot that holds the job's prefix, if none holds a longer one; else the one of use longest ago."""
        if not self._prefix_reuse:
            return free[0]
        best = best_match(job.tokens, self.slots)
        longest = best.length if best is not None else 0

        def worth(slot: HeadSlot) -> tuple[bool, bool, int]:
            return not self._is_pinned(slot), 0 < longest == held_match(job.tokens, slot), -slot.used

        return max(free, key=worth)

    def _use(self, slot: HeadSlot) -> None:
        self._count += 1
        slot.used = self._count

    # -- prefill ----------------------------------------------------------------------------------------------

    def next_chunk(self, most: int) -> Chunk | None:
        """At most `most` tokens of the slot that has prefilled longest; None: nothing to send, or no credit."""
        in_flight = [0] * self._num_lanes
        for slot in self.slots:
            if slot.phase is Phase.PREFILL:
                in_flight[self.prefill_lane(slot)] += len(slot.awaited)
        for slot in self._prefilling:
            if len(slot.awaited) >= SLOT_CREDIT or in_flight[self.prefill_lane(slot)] >= LANE_CREDIT:
                continue
            if slot.round >= 0:
                return self._cut(slot, most, None)
            if not self._must_wait(slot):
                return self._cut(slot, most, self._start(slot))
        return None

    def prefill_lane(self, slot: HeadSlot) -> int:
        """The lane of all chunks of a slot: they must stay in order."""
        return slot.index % self._num_lanes

    @property
    def num_prefilling(self) -> int:
        """Slots with chunks to send."""
        return len(self._prefilling)

    def _cut(self, slot: HeadSlot, most: int, copy: Match | None) -> Chunk:
        length = min(most, slot.goal - slot.prefilled)
        last = slot.prefilled + length == slot.goal
        if last:
            self._prefilling.remove(slot)
        start, slot.prefilled = slot.prefilled, slot.prefilled + length
        copied = None if copy is None else copy.source.held.generation
        return Chunk(slot, slot.generation, slot.next_round(), start, length, last, copy, copied)

    def _must_wait(self, slot: HeadSlot) -> bool:
        """Whether the slot's first chunk may not go yet, or had better not."""
        if self._is_pinned(slot):
            return True
        if slot.promise is not None and slot.promise.pending:
            return True
        slot.promise = None
        if self._reuses(slot):
            assert slot.job is not None
            now = best_match(slot.job.tokens, self.slots, at_home=slot)
            slot.promise = worth_waiting_for(slot, self._ahead_of(slot), now)
        return slot.promise is not None

    def _start(self, slot: HeadSlot) -> Match | None:
        """Choose the prefix to copy, and begin behind it."""
        assert slot.job is not None
        if not self._reuses(slot):
            return None
        match = best_match(slot.job.tokens, self.slots, at_home=slot)
        if match is not None:
            slot.source, slot.prefilled = match
            self._use(match.source)
        return match

    def _reuses(self, slot: HeadSlot) -> bool:
        # After a void row the job is prefilled plainly: whatever went wrong shall not go wrong again.
        return self._prefix_reuse and slot.job is not None and slot.job.restarts == 0

    def _is_pinned(self, slot: HeadSlot) -> bool:
        """Whether a copy from this slot is on its way: it must not begin another generation before."""
        return any(other.source is slot and other is not slot for other in self.slots)

    def _ahead_of(self, slot: HeadSlot) -> Iterator[HeadSlot]:
        """Slots that began to prefill before this one. Nobody waits for one behind, so nobody waits for ever."""
        place = self._prefilling.index(slot)
        behind = {id(other) for number, other in enumerate(self._prefilling) if number >= place}
        return (other for other in self.slots if other.phase is Phase.PREFILL and id(other) not in behind)

    # -- rounds -----------------------------------------------------------------------------------------------

    def decode(self, slot: HeadSlot) -> None:
        """The slot's last row was committed: it waits for a round."""
        slot.phase = Phase.DECODE
        self._ready[slot] = None

    def ready_rows(self) -> list[HeadSlot]:
        """The rows that wait for a round, the one that has waited longest first."""
        return list(self._ready)

    def depart(self, slot: HeadSlot) -> None:
        """The slot's row goes into a round."""
        del self._ready[slot]

    @property
    def num_rows(self) -> int:
        """Rows that decode, waiting or in flight."""
        return sum(slot.phase is Phase.DECODE for slot in self.slots)
