"""Common prefixes of slots: copied in both halves instead of computed and sent. No torch, no I/O.

What a slot holds stays of use after its job, until another generation begins there; a prefix that is only being
prefilled can be waited for. Keys and values of a position depend on the tokens up to it and on nothing else, so a
copied prefix is the prefix (up to the rounding that also depends on how a prefill was cut into chunks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workers.head.slots import HeadSlot, Promise

#: tokens; shorter prefixes are not worth a copy
MIN_COPY = 16
#: tokens that waiting must save beyond what can be copied at once: it costs a round trip
MIN_WAIT = 32


class Match(NamedTuple):
    """`length` tokens that a slot holds and that another one needs."""

    source: HeadSlot
    length: int


def common_length(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """Tokens that both begin with, at most `most`; 0 if fewer than `MIN_COPY`."""
    most = min(most, len(first), len(second))
    if most < MIN_COPY or first[:MIN_COPY] != second[:MIN_COPY]:
        return 0
    low, high = MIN_COPY, most  # the first `low` are equal; comparing slices beats comparing tokens
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def held_match(wanted: Sequence[int], source: HeadSlot) -> int:
    """Tokens of `wanted` that can be copied from `source`: the last one is left, for its row is to be sampled."""
    return common_length(wanted, source.held.tokens, min(source.held.length, len(wanted) - 1))


def best_match(wanted: Sequence[int], sources: Iterable[HeadSlot], *, at_home: HeadSlot | None = None) -> Match | None:
    """The longest prefix that can be copied now; of equally long ones that of `at_home`, where it lies already."""
    best: Match | None = None
    for source in sources:
        length = held_match(wanted, source)
        if length and (best is None or (length, source is at_home) > (best.length, best.source is at_home)):
            best = Match(source, length)
    return best


def worth_waiting_for(slot: HeadSlot, ahead: Iterable[HeadSlot], now: Match | None) -> Promise | None:
    """The longest prefix that slots prefilling `ahead` of this one will hold, if that saves much more than `now`."""
    assert slot.job is not None
    least = MIN_WAIT + (now.length if now is not None else 0)
    best: Promise | None = None
    for source in ahead:
        assert source.job is not None
        length = common_length(slot.job.tokens, source.job.tokens, min(slot.goal - 1, source.goal))
        if length >= least and (best is None or length > best.length):
            best = Promise(source, source.generation, length)
    return best
