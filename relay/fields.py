"""Reading a header's fields: every value is checked for its type and its bounds before anyone sees it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import cast

from relay.errors import FrameInvalid

MAX_LANES = 64
#: rows of a round or a verdict
MAX_ROWS = 4096
#: drafted tokens of a row, tokens of a verdict
MAX_TOKENS = 1024
#: entries of a logit bias, tokens barred from being chosen
MAX_BIASES = 1024
MAX_BARRED = 1024
#: likeliest tokens told at each position
MAX_ALTERNATIVES = 20
#: different tokens of a prompt, and tokens of an output, that penalties count: both together fit a header
MAX_HISTORY = 120_000
#: characters of ids, names and digests
MAX_NAME = 256
#: of a process' life: some thirty years
MAX_SECONDS = 1e9
#: characters of an error's text
MAX_TEXT = 16384

INT31 = 2**31 - 1
INT63 = 2**63 - 1


class Fields:
    """Takes the items of one msgpack array in order and checks each; raises `FrameInvalid`."""

    def __init__(self, value: object, where: str, count: int) -> None:
        if not isinstance(value, list) or len(value) != count:
            raise FrameInvalid(f"{where}: expected {count} fields")
        self._items = iter(value)
        self._where = where

    def integer(self, name: str, low: int = 0, high: int = INT31) -> int:
        """An integer from `low` to `high`."""
        value = next(self._items)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def long(self, name: str) -> int:
        """A counter: an integer that is not negative, of 63 bits."""
        return self.integer(name, 0, INT63)

    def number(self, name: str, high: float = math.inf, low: float = 0.0) -> float:
        """A finite number from `low` to `high`."""
        value = next(self._items)
        if type(value) is not float or not math.isfinite(value) or not low <= value <= high:
            raise self._wrong(name, value, f"a finite number from {low:g} to {high:g}")
        return value

    def numbers(self, name: str, limit: int) -> tuple[float, ...]:
        """At most `limit` finite numbers."""
        values = self.array(name, limit)
        if not all(type(value) is float and math.isfinite(value) for value in values):
            raise FrameInvalid(f"{self._where}.{name}: expected finite numbers")
        return cast("tuple[float, ...]", tuple(values))

    def flag(self, name: str) -> bool:
        """True or false."""
        value = next(self._items)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, limit: int = MAX_NAME) -> str:
        """A text of at most `limit` characters."""
        value = next(self._items)
        if type(value) is not str or len(value) > limit:
            raise self._wrong(name, value, f"a text of at most {limit} characters")
        return value

    def binary(self, name: str, num_bytes: int) -> bytes:
        """Exactly so many bytes."""
        value = next(self._items)
        if type(value) is not bytes or len(value) != num_bytes:
            raise self._wrong(name, value, f"{num_bytes} bytes")
        return value

    def array(self, name: str, limit: int) -> list[object]:
        """A list of at most `limit` items, which are still to be checked."""
        value = next(self._items)
        if not isinstance(value, list) or len(value) > limit:
            raise self._wrong(name, value, f"a list of at most {limit} items")
        return value

    def packed(self, name: str, code: str, limit: int) -> tuple[float, ...]:
        """At most `limit` values that `pack` wrote with the same code, still to be checked."""
        value = next(self._items)
        width = struct.calcsize(f"<{code}")
        if type(value) is not bytes or len(value) % width or len(value) > limit * width:
            raise self._wrong(name, value, f"at most {limit} values of {width} bytes")
        return struct.unpack(f"<{len(value) // width}{code}", value)

    def packed_tokens(self, name: str, limit: int) -> tuple[int, ...]:
        """At most `limit` token ids that `pack` wrote as "I"."""
        values = self.packed(name, "I", limit)
        if max(values, default=0) > INT31:
            raise FrameInvalid(f"{self._where}.{name}: expected integers from 0 to {INT31}")
        return cast("tuple[int, ...]", values)

    def tokens(self, name: str, limit: int = MAX_TOKENS) -> tuple[int, ...]:
        """At most `limit` token ids."""
        values = self.array(name, limit)
        # the bulk of a header: one loop instead of a call per token
        if not all(type(value) is int and 0 <= value <= INT31 for value in values):
            raise FrameInvalid(f"{self._where}.{name}: expected integers from 0 to {INT31}")
        return cast("tuple[int, ...]", tuple(values))

    def item(self) -> object:
        """The next item, unchecked: a nested record."""
        return next(self._items)

    def _wrong(self, name: str, value: object, expected: str) -> FrameInvalid:
        return FrameInvalid(f"{self._where}.{name}: expected {expected}, got {type(value).__name__} {str(value)[:40]}")


def pack(values: Sequence[float], code: str, name: str) -> bytes:
    """Many values of one kind ("I": token ids, "f": float32), little-endian. Raises `FrameInvalid`."""
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError) as error:
        raise FrameInvalid(f"{name}: {error}") from error
