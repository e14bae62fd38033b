"""A command on a terminal of its own, and what a person sees there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pyte

from cli.processes import child_environment, shardq_argv

#: seconds until a screen must show what it is to show
PATIENCE_S = 60.0


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal."""

    def __init__(self, environment: Mapping[str, str], columns: int, lines: int, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self._lock = threading.Lock()
        self._screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self.resize(columns, lines)
        values = {"TERM": "xterm-256color", **environment}
        inherited = {name: value for name, value in child_environment(values).items() if name not in _NO_SCREEN}
        self.process = subprocess.Popen(
            shardq_argv(*arguments),
            env=inherited,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # its keys, Ctrl-C and changes of size reach the process as on any terminal
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # Linux says so of a terminal that nobody has open any more
                return
            with self._lock:
                self._stream.feed(data)

    def lines(self) -> list[str]:
        """The screen, without the blanks at the ends of lines."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def everything(self) -> list[str]:
        """What has left the screen at its top, and the screen."""
        with self._lock:
            width = self._screen.columns
            before = ["".join(line[x].data for x in range(width)).rstrip() for line in self._screen.history.top]
            return [*before, *(line.rstrip() for line in self._screen.display)]

    def resize(self, columns: int, lines: int) -> None:
        """As when a window is drawn larger or smaller."""
        with self._lock:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            self._screen.resize(lines, columns)

    def press(self, keys: str) -> None:
        """Type; `\\x03` is Ctrl-C."""
        os.write(self._master, keys.encode())

    def wait_for(self, shown: Callable[[list[str]], object]) -> list[str]:
        """The screen once `shown` is true of it."""
        deadline = time.monotonic() + PATIENCE_S
        while not shown(lines := self.lines()):
            assert self.process.poll() is None, "\n".join(self.everything())
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.02)
        return lines

    def end(self) -> int:
        """Wait for the process' own end, with everything it wrote on the screen; its exit status."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """End the process if it runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._master)


#: variables that would say how wide the screen is, or that there is none
_NO_SCREEN = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")


@contextmanager
def on_a_terminal(
    environment: Mapping[str, str], *arguments: str, columns: int = 80, lines: int = 24
) -> Iterator[Terminal]:
    """`shardq` with these arguments on a terminal of this size."""
    terminal = Terminal(environment, columns, lines, *arguments)
    try:
        yield terminal
    finally:
        terminal.close()
