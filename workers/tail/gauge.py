"""What a tail counts of its own work, and when it tells its head."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from relay.messages import Accepted, Verdict
from relay.tail_figures import TailFigures
from workers.memory import gpu_memory

#: seconds between two verdicts with figures
TELL_EVERY_S = 2.0


class TailGauge:
    """Totals of a tail's process; outlives its epochs."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._started = clock()
        self._told = float("-inf")
        self._rows = 0
        self._tokens = 0
        self._compute_s = 0.0

    def marked(self, verdict: Verdict) -> Verdict:
        """The verdict, counted; with the figures if they are due."""
        self._rows += len(verdict.rows)
        self._tokens += sum(len(row.tokens) for row in verdict.rows if isinstance(row, Accepted))
        self._compute_s += verdict.tail_s
        now = self._clock()
        if now < self._told + TELL_EVERY_S:
            return verdict
        self._told = now
        return replace(verdict, figures=self._figures(now))

    def _figures(self, now: float) -> TailFigures:
        used, total = gpu_memory(self._device)
        return TailFigures(self._rows, self._tokens, self._compute_s, now - self._started, used, total)
