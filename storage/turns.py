"""Whose job is fed next: a pure function of priority, owner and batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")

#: of every batch, as long as batches belong to nobody
EVERYBODY = ""


@dataclass(frozen=True, slots=True)
class Contender:
    """A batch with waiting jobs for a served name."""

    batch_id: str
    #: 0 is served first
    priority: int
    #: its jobs for that name that are queued or running
    num_in_flight: int
    #: seconds, by the database's clock
    in_progress_at: float
    owner: str = EVERYBODY


def in_turn(contenders: Iterable[Contender], waiting: Callable[[str], Iterator[T]]) -> Iterator[T]:
    """The waiting jobs of all batches in the order in which they are to be fed; `waiting` gives those of one.

    A more urgent job comes before every less urgent one. Within a priority owners take turns, one job each, however
    many batches they have, and so do an owner's batches, however many jobs they have. Whoever has the fewest jobs in
    flight begins, of two the one that came first. Reads no job before its turn.
    """
    for _, level in groupby(sorted(contenders, key=attrgetter("priority")), key=attrgetter("priority")):
        owners: dict[str, list[Contender]] = {}
        for contender in level:
            owners.setdefault(contender.owner, []).append(contender)
        first_owners = sorted(owners.values(), key=_owner_rank)
        yield from _one_each([_one_each([waiting(item.batch_id) for item in _ranked(own)]) for own in first_owners])


def _ranked(own: Iterable[Contender]) -> list[Contender]:
    return sorted(own, key=attrgetter("num_in_flight", "in_progress_at", "batch_id"))


def _owner_rank(own: Sequence[Contender]) -> tuple[int, float, str]:
    return sum(item.num_in_flight for item in own), min(item.in_progress_at for item in own), own[0].owner


def _one_each(sources: Sequence[Iterator[T]]) -> Iterator[T]:
    """One of each in turn, until all are at their end."""
    remaining = deque(sources)
    while remaining:
        source = remaining.popleft()
        for item in islice(source, 1):
            yield item
            remaining.append(source)
