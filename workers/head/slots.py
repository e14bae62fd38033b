"""One slot's side of the row identity, its job, and what the caches hold at its place. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from workers.head.jobs import Job


class Phase(Enum):
    """What a slot is doing."""

    FREE = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(frozen=True, slots=True)
class Held:
    """The first `length` of `tokens` stand at a slot's place in both halves' caches: the tail has said so.

    That outlives the job, up to the slot's next generation. `tokens` may be a job's own, growing list.
    """

    generation: int
    tokens: Sequence[int]
    length: int


NOTHING_HELD = Held(-1, (), 0)


@dataclass(frozen=True, slots=True)
class Promise:
    """A prefix that `source` will hold when its prefill has come so far."""

    source: HeadSlot
    generation: int
    length: int

    @property
    def pending(self) -> bool:
        """Whether it is still to be kept: neither kept nor broken."""
        source = self.source
        if source.phase is not Phase.PREFILL or source.generation != self.generation:
            return False
        return source.held.generation != self.generation or source.held.length < self.length


@dataclass(slots=True, eq=False)
class HeadSlot:
    """The head counts generations and rounds, and remembers which rounds the tail has not answered."""

    index: int
    phase: Phase = Phase.FREE
    job: Job | None = None
    generation: int = -1
    #: the last round sent
    round: int = -1
    #: rounds sent and not yet answered
    awaited: set[int] = field(default_factory=set)
    #: tokens of this generation's prefill that were copied or sent, and their total
    prefilled: int = 0
    goal: int = 0
    held: Held = NOTHING_HELD
    #: whose prefix this generation's first chunk copies, until the tail has answered it
    source: HeadSlot | None = None
    #: the prefix that this slot's prefill waits for
    promise: Promise | None = None
    #: the scheduler's count when the slot's caches were last of use: the smallest goes first
    used: int = 0

    def begin(self) -> None:
        """Start a generation: the job's tokens so far are to be prefilled."""
        assert self.job is not None
        self.phase = Phase.PREFILL
        self.generation += 1
        self.round = -1
        self.awaited.clear()
        self.prefilled, self.goal = 0, len(self.job.tokens)
        self.source = self.promise = None

    def next_round(self) -> int:
        """The number of the row that is sent now; its answer is awaited from here on."""
        if self.round < 0:  # the tail forgets the generation before
            self.held = NOTHING_HELD
        self.round += 1
        self.awaited.add(self.round)
        return self.round

    def awaits(self, generation: int, number: int) -> bool:
        """Whether an answer belongs to this slot's present work."""
        return generation == self.generation and number in self.awaited

    def answered(self, number: int) -> None:
        """The tail has answered a round: it needs nobody else's prefix any more."""
        self.awaited.discard(number)
        self.source = None

    def hold(self, length: int) -> None:
        """The tail has confirmed so many positions of this generation; fewer than before change nothing."""
        assert self.job is not None
        if self.held.generation != self.generation or self.held.length < length:
            self.held = Held(self.generation, self.job.tokens, length)
