"""Where drafts are made: in the engine's own thread, or in another one while the engine goes on.

Either way the drafter sees the same calls in the same order, one at a time, and a row's draft follows from its
committed tokens: the drafts are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from workers.head.drafters import Drafter, DraftRow, Proposal
from workers.head.slots import HeadSlot, Phase


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of a lane's next round, and what the drafter is asked for each of them."""

    lane: int
    slots: tuple[HeadSlot, ...]
    #: the slots' generations when this was asked
    generations: tuple[int, ...]
    rows: tuple[DraftRow, ...]
    #: rounds in flight at the same time, this one included
    lanes: int

    @property
    def places(self) -> list[int]:
        """The rows that still want their draft: a job may have ended, or begun anew, while it was made."""
        return [
            place
            for place, (slot, generation) in enumerate(zip(self.slots, self.generations, strict=True))
            if slot.phase is Phase.DECODE and slot.generation == generation
        ]

    @property
    def present(self) -> list[HeadSlot]:
        """The slots of those rows."""
        return [self.slots[place] for place in self.places]


class Drafted(NamedTuple):
    """What the drafter said to `Asked.rows`, and its time for that."""

    proposals: Sequence[Proposal]
    draft_s: float


class Pending(NamedTuple):
    """A round whose drafts are there, or can be had at once."""

    asked: Asked
    #: raises what the drafter raised
    drafted: Callable[[], Drafted]


class Drafting(Protocol):
    """The engine's way to its drafter. One thread owns it."""

    def begin(self, slot: int) -> None:
        """As `Drafter.begin`, ordered with everything else."""

    def end(self, slot: int) -> None:
        """As `Drafter.end`, ordered with everything else."""

    def ask(self, asked: Asked) -> None:
        """The drafts of this round are wanted."""

    def take(self) -> Pending | None:
        """The round asked for longest ago, once its drafts can be had; None until then."""

    def forget(self) -> None:
        """No round that was asked for is wanted any more; the jobs' tokens may grow when this returns."""

    def close(self) -> None:
        """End the thread, if there is one."""


class DraftingHere:
    """Drafts in the engine's thread, when a round is taken."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._asked: deque[Asked] = deque()

    def begin(self, slot: int) -> None:
        self._drafter.begin(slot)

    def end(self, slot: int) -> None:
        self._drafter.end(slot)

    def ask(self, asked: Asked) -> None:
        self._asked.append(asked)

    def take(self) -> Pending | None:
        if not self._asked:
            return None
        asked = self._asked.popleft()
        return Pending(asked, partial(_draft, self._drafter, asked.rows))

    def forget(self) -> None:
        self._asked.clear()

    def close(self) -> None: ...


class DraftingApart:
    """Drafts in a thread of its own, for a drafter on another device than the head's half.

    While the engine computes one lane's forward, the next lane's drafts are made.
    """

    def __init__(self, drafter: Drafter, device: str, ready: Callable[[], None]) -> None:
        """`ready` is called from the thread whenever drafts are there to be taken."""
        self._drafter = drafter
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, "drafter", initializer=_settle_on, initargs=(torch.device(device),))
        self._rounds: deque[tuple[Asked, Future[Drafted]]] = deque()
        #: `begin`s and `end`s whose errors were not looked at yet
        self._errands: deque[Future[None]] = deque()

    def begin(self, slot: int) -> None:
        self._errands.append(self._thread.submit(self._drafter.begin, slot))

    def end(self, slot: int) -> None:
        self._errands.append(self._thread.submit(self._drafter.end, slot))

    def ask(self, asked: Asked) -> None:
        drafted = self._thread.submit(_draft, self._drafter, asked.rows)
        self._rounds.append((asked, drafted))
        drafted.add_done_callback(lambda _: self._ready())

    def take(self) -> Pending | None:
        while self._errands and self._errands[0].done():
            self._errands.popleft().result()
        if not self._rounds or not self._rounds[0][1].done():
            return None
        asked, drafted = self._rounds.popleft()
        return Pending(asked, drafted.result)

    def forget(self) -> None:
        for _, drafted in reversed(self._rounds):  # those that wait before the one under way
            if not drafted.cancel():
                drafted.exception()  # the drafter reads the jobs' own lists: it must be done before they grow
        self._rounds.clear()

    def close(self) -> None:
        self.forget()
        self._thread.shutdown()


def _draft(drafter: Drafter, rows: Sequence[DraftRow]) -> Drafted:
    started = time.perf_counter()
    proposals = drafter.propose(rows)
    return Drafted(proposals, time.perf_counter() - started)


def _settle_on(device: torch.device) -> None:
    if device.type == "cuda":  # kernels and graphs of this thread go there
        torch.cuda.set_device(device)
