"""What the client says while it works, and who says it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from storage.batch_records import Counts


class Ticks(Protocol):
    """How far something long is."""

    def tick_bytes(self, num_bytes: int) -> None:
        """So many bytes are done."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A batch at one moment of being watched."""

    counts: Counts
    completion_tokens: int
    #: since the batch was published
    elapsed_s: float
    #: completion tokens of ended jobs per second, lately (those of stopped jobs left out) and since the start
    tps_now: float | None
    tps_overall: float | None
    #: until the last job ends, at the rate so far
    eta_s: float | None
    #: the batch is being cancelled
    stopping: bool = False

    @property
    def not_done(self) -> dict[str, int]:
        """Jobs that ended without success, by state; failed ones also if there are none."""
        counts = self.counts
        stopped = {"cancelled": counts.cancelled, "expired": counts.expired}
        return {"failed": counts.failed, **{name: number for name, number in stopped.items() if number}}


class Display(Protocol):
    """Where snapshots are shown."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the newest."""

    def say(self, message: str) -> None:
        """A remark beside the progress."""

    def close(self) -> None:
        """Leave the last one standing."""


class Voice(Protocol):
    """The seam between the client and whoever looks."""

    def note(self, message: str) -> None:
        """What is going on."""

    def warn(self, message: str) -> None:
        """A remark that stops nothing."""

    def ticker(self, what: str, total_bytes: int | None = None) -> AbstractContextManager[Ticks]:
        """Progress of something long, for the length of a block."""

    def display(self) -> Display:
        """Progress of a batch."""


class Silence:
    """Says nothing."""

    def note(self, message: str) -> None:
        """Unsaid."""

    def warn(self, message: str) -> None:
        """Unsaid."""

    def ticker(self, what: str, total_bytes: int | None = None) -> AbstractContextManager[Ticks]:
        """Not shown."""
        return nullcontext(self)

    def display(self) -> Display:
        """Not shown."""
        return self

    def tick_bytes(self, num_bytes: int) -> None:
        """Not shown."""

    def show(self, snapshot: Snapshot) -> None:
        """Not shown."""

    def say(self, message: str) -> None:
        """Unsaid."""

    def close(self) -> None:
        """Nothing is open."""
