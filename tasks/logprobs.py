"""Log probabilities as they travel and are stored: each token that occurs is described once.

Twenty alternatives for each of 4,000 tokens are 84,000 log probabilities of some thousand different tokens. Written out
one by one they would take five times the bytes, and the head's loop would wait while they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from relay.plain import from_plain


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could stand at a position."""

    token: int
    #: decoded by itself, and its bytes: a token may hold a part of a character
    text: str
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probabilities at one position of a completion."""

    chosen: Alternative
    #: likeliest first
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """A token that occurs."""

    token: int
    text: str
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Log probabilities of all positions in one row: at each the chosen token, then the likeliest ones."""

    known: tuple[_Known, ...]
    #: likeliest tokens at each position
    counts: tuple[int, ...]
    #: of each alternative: its place in `known`, and its log probability
    places: tuple[int, ...]
    logprobs: tuple[float, ...]


def pack(positions: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """As plain JSON values; None for none."""
    if not positions:
        return None
    places: dict[tuple[int, str, tuple[int, ...]], int] = {}
    row = [item for position in positions for item in (position.chosen, *position.top)]
    packed = [places.setdefault((item.token, item.text, item.bytes), len(places)) for item in row]
    return {
        "known": [{"token": token, "text": text, "bytes": shown} for token, text, shown in places],
        "counts": [len(position.top) for position in positions],
        "places": packed,
        "logprobs": [item.logprob for item in row],
    }


def unpack(value: object) -> tuple[TokenLogprob, ...]:
    """What `pack` was given. Raises ValueError for anything that it does not write."""
    if value is None:
        return ()
    packed = from_plain(_Packed, value)
    if len(packed.places) != len(packed.logprobs) or len(packed.places) != sum(packed.counts) + len(packed.counts):
        raise ValueError("logprobs: counts, places and logprobs do not belong together")
    if not all(0 <= place < len(packed.known) for place in packed.places) or min(packed.counts, default=0) < 0:
        raise ValueError("logprobs: a place or a count is out of range")
    if not all(0 <= byte < 256 for known in packed.known for byte in known.bytes):
        raise ValueError("logprobs: a byte is none")
    alternatives = _alternatives(packed)
    return tuple(TokenLogprob(next(alternatives), tuple(islice(alternatives, count))) for count in packed.counts)


def _alternatives(packed: _Packed) -> Iterator[Alternative]:
    for place, logprob in zip(packed.places, packed.logprobs, strict=True):
        known = packed.known[place]
        yield Alternative(known.token, known.text, known.bytes, logprob)
