"""Single key presses on a terminal, while something is shown on it."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pressed_keys() -> Iterator[Keyboard]:
    """Keys come at once and are not shown, until the block ends. Without a terminal to read from there are none."""
    if not sys.stdin.isatty():
        yield Keyboard(None)
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield Keyboard(number)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


class Keyboard:
    """Where keys come from."""

    def __init__(self, number: int | None) -> None:
        """`number`: the terminal's file; None: no keys ever come."""
        self._number = number

    def wait(self, timeout_s: float) -> str:
        """What was typed, waiting at most so long for it; empty if nothing was."""
        if self._number is None:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([self._number], [], [], timeout_s)
        return os.read(self._number, 64).decode(errors="replace") if ready else ""
