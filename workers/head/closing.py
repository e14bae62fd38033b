"""Whether a job can still be finished on a machine that will be taken away. No torch, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

#: tokens/s of a slot as long as nothing was measured
UNMEASURED_TPS = 1.0
#: what an estimate is multiplied by: rounds get slower with more rows, drafts worse with other texts
SAFETY = 2.0
#: tokens of a prompt that take as long as one of a completion, at the most
PROMPT_TOKENS = 8
#: the weight of a new measurement
_WEIGHT = 0.2
#: seconds before the end at which nothing is taken any more, however short
LAST_S = 15.0


class Closing:
    """Closed for good by the first job that cannot be finished by `ends_at`, or `LAST_S` before it.

    For good, because a message that was handed back is the next one that this head would get again.
    """

    def __init__(self, ends_at: float | None, clock: Callable[[], float] = time.time) -> None:
        """`ends_at`: seconds of `clock`, when the last job must have ended; None: never."""
        self._ends_at = ends_at
        self._clock = clock
        self._tps: float | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing may begin any more."""
        if self._ends_at is not None and self._clock() >= self._ends_at - LAST_S:
            self._closed = True
        return self._closed

    def measured(self, tps: float | None) -> None:
        """A job decodes, or decoded, at so many tokens/s; None where there was no interval to measure."""
        if tps:
            self._tps = tps if self._tps is None else (1 - _WEIGHT) * self._tps + _WEIGHT * tps

    def needs_s(self, num_prompt: int, max_tokens: int) -> float:
        """Seconds that a job may take which begins now, at the most that is likely."""
        tokens = max_tokens + num_prompt / PROMPT_TOKENS
        return SAFETY * tokens / (self._tps or UNMEASURED_TPS)

    def admits(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether such a job may begin now; one that may not closes."""
        if self._ends_at is not None and self._clock() + self.needs_s(num_prompt, max_tokens) > self._ends_at:
            self._closed = True
        return not self.closed
