"""Reading a header's fields: every value is checked for its type and its bounds before anyone sees it."""

from __future__ import annotations

import math
from typing import cast

from relay.errors import FrameInvalid

MAX_LANES = 64
#: rows of a round or a verdict
MAX_ROWS = 4096
#: drafted tokens of a row, tokens of a verdict
MAX_TOKENS = 1024
#: characters of ids, names and digests
MAX_NAME = 256
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

    def number(self, name: str, high: float = math.inf) -> float:
        """A finite number from 0 to `high`."""
        value = next(self._items)
        if type(value) is not float or not math.isfinite(value) or not 0.0 <= value <= high:
            raise self._wrong(name, value, f"a finite number from 0 to {high}")
        return value

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

    def tokens(self, name: str) -> tuple[int, ...]:
        """At most `MAX_TOKENS` token ids."""
        values = self.array(name, MAX_TOKENS)
        # the bulk of a header: one loop instead of a call per token
        if not all(type(value) is int and 0 <= value <= INT31 for value in values):
            raise FrameInvalid(f"{self._where}.{name}: expected integers from 0 to {INT31}")
        return cast("tuple[int, ...]", tuple(values))

    def item(self) -> object:
        """The next item, unchecked: a nested record."""
        return next(self._items)

    def _wrong(self, name: str, value: object, expected: str) -> FrameInvalid:
        return FrameInvalid(f"{self._where}.{name}: expected {expected}, got {type(value).__name__} {str(value)[:40]}")
