"""Which job sits in which slot, and what its slot does next. No torch, no I/O.

A slot works on one *generation* at a time: prefill in chunks, then rounds. A generation is begun anew, from the
job's committed tokens, whenever the tail's state may differ from ours (a new epoch, a void row).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from workers.head.jobs import Job


class Phase(Enum):
    """What a slot is doing."""

    FREE = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True, eq=False)
class HeadSlot:
    """One slot's side of the row identity (slot, generation, round), and its job."""

    index: int
    lane: int
    phase: Phase = Phase.FREE
    job: Job | None = None
    generation: int = -1
    #: the last round sent
    round: int = -1
    #: rounds sent and not yet answered
    awaited: set[int] = field(default_factory=set)
    #: tokens of this generation's prefill that were sent, and their total
    prefilled: int = 0
    goal: int = 0

    def begin(self) -> None:
        """Start a generation: the job's tokens so far are to be prefilled."""
        assert self.job is not None
        self.phase = Phase.PREFILL
        self.generation += 1
        self.round = -1
        self.awaited.clear()
        self.prefilled, self.goal = 0, len(self.job.tokens)

    def next_round(self) -> int:
        """The number of the row that is sent now; its answer is awaited from here on."""
        self.round += 1
        self.awaited.add(self.round)
        return self.round

    def awaits(self, generation: int, number: int) -> bool:
        """Whether an answer belongs to this slot's present work."""
        return generation == self.generation and number in self.awaited


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a slot's prefill."""

    slot: HeadSlot
    start: int
    length: int
    last: bool


class Scheduler:
    """Slots, lanes and the line of waiting jobs, first come first served."""

    def __init__(self, *, slots: int, lanes: int, prefill_chunk: int, prefill_credit: int) -> None:
        self.slots = [HeadSlot(index, index % lanes) for index in range(slots)]
        self.num_lanes = lanes
        self._chunk = prefill_chunk
        #: most prefill chunks in flight at once
        self._credit = prefill_credit
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[HeadSlot] = deque()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the line."""
        self._waiting.append(job)

    def admit(self) -> Iterator[HeadSlot]:
        """Give waiting jobs the free slots, yielding each slot as it starts."""
        for slot in self.slots:
            if not self._waiting:
                return
            if slot.phase is Phase.FREE:
                slot.job = self._waiting.popleft()
                self.restart(slot)
                yield slot

    def restart(self, slot: HeadSlot) -> None:
        """Begin a new generation of the slot's job."""
        slot.begin()
        if slot not in self._prefilling:
            self._prefilling.append(slot)

    def next_chunk(self) -> Chunk | None:
        """The next prefill chunk of the slot that has prefilled longest, or None (nothing to do, or no credit)."""
        if not self.has_chunks:
            return None
        slot = self._prefilling[0]
        length = min(self._chunk, slot.goal - slot.prefilled)
        last = slot.prefilled + length == slot.goal
        if last:
            self._prefilling.popleft()
        start, slot.prefilled = slot.prefilled, slot.prefilled + length
        return Chunk(slot, start, length, last)

    def ready_rows(self, lane: int) -> list[HeadSlot]:
        """The lane's rows for a new round; empty while a round of the lane is in flight."""
        rows = [slot for slot in self.slots if slot.lane == lane and slot.phase is Phase.DECODE]
        return [] if any(slot.awaited for slot in rows) else rows

    def free(self, slot: HeadSlot) -> Job:
        """Take the slot's job out; answers still on their way no longer match the slot."""
        job = slot.job
        assert job is not None
        slot.job, slot.phase = None, Phase.FREE
        slot.awaited.clear()
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        return job

    def live(self) -> list[HeadSlot]:
        """The slots with a job."""
        return [slot for slot in self.slots if slot.job is not None]

    def drop_waiting(self) -> list[Job]:
        """Empty the line and return what stood in it."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    @property
    def num_waiting(self) -> int:
        """Jobs without a slot."""
        return len(self._waiting)

    @property
    def num_unanswered(self) -> int:
        """Rows whose answers are awaited."""
        return sum(len(slot.awaited) for slot in self.slots)

    @property
    def has_chunks(self) -> bool:
        """Whether a prefill chunk may be sent now."""
        in_flight = sum(len(slot.awaited) for slot in self.slots if slot.phase is Phase.PREFILL)
        return bool(self._prefilling) and in_flight < self._credit
