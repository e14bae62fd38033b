"""How many jobs may run at the same time, after there was no memory for as many. No torch, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

#: seconds without a lack of memory after which more jobs may run again
RAISE_AFTER_S = 60.0
#: the part of the present number by which it is raised, at least by one
RAISE_BY = 0.25


class Allowance:
    """As many jobs as there are slots; half of those that ran at each lack of memory; slowly more again after it."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._most = slots
        self._changed_at = clock()

    @property
    def most(self) -> int:
        """Jobs that may run now."""
        now = self._clock()
        while self._most < self._slots and now - self._changed_at >= RAISE_AFTER_S:
            self._most = min(self._slots, self._most + max(1, int(self._most * RAISE_BY)))
            self._changed_at += RAISE_AFTER_S
        return self._most

    def fell_short(self, running: int) -> int:
        """There was no memory while so many jobs ran: the number that may run from now on, at least one."""
        self._most = max(1, min(self._most, running) // 2)
        self._changed_at = self._clock()
        return self._most
