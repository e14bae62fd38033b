"""Say that something long is going on, and how far it is."""

from __future__ import annotations

import math
import os
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.cells import cell_len, set_cell_size

from cli.manner import is_quiet
from cli.output import duration, percent, size

#: seconds of silence before the first word
PATIENCE_S = 2.0
#: seconds between two updates: on a terminal, elsewhere
UPDATE_S = 0.2
LINE_S = 5.0


class Ticker:
    """A context manager; nothing is shown for work that takes less than two seconds."""

    def __init__(self, what: str, total_bytes: int | None = None, out: TextIO | None = None) -> None:
        self._what = what
        self._total = total_bytes
        self._out = out or sys.stderr
        self._is_live = self._out.isatty()
        self._start = time.monotonic()
        self._next = self._start + (math.inf if is_quiet() else PATIENCE_S)
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._is_live:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def tick(self, detail: str = "") -> None:
        """Show how far the work is, if it is time; the time it has taken if there is no detail."""
        if time.monotonic() >= self._next:
            self._show(f"{self._what}: {detail or duration(time.monotonic() - self._start)}")

    def tick_bytes(self, num_bytes: int) -> None:
        """As `tick`, in bytes done."""
        if time.monotonic() >= self._next:
            share = f" ({percent(num_bytes, self._total)})" if self._total else ""
            self._show(f"{self._what}: {size(num_bytes)}{share}")

    def _show(self, text: str) -> None:
        self._next = time.monotonic() + (UPDATE_S if self._is_live else LINE_S)
        self._shown = True
        self._out.write(f"\r\x1b[K{self._fitting(text)}" if self._is_live else f"{text}\n")
        self._out.flush()

    def _fitting(self, text: str) -> str:
        """The text, cut to the terminal's line as it is now: what it wraps would be left behind."""
        width = os.get_terminal_size(self._out.fileno()).columns - 1
        return text if width < 1 or cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
