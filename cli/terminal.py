"""The usual voice of the client: stderr, as the command line uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cli.client.client import Client
from cli.client.local import Local
from cli.client.voice import Display
from cli.interruption import interruptible
from cli.output import note, warn
from cli.ticker import Ticker
from cli.watch import make_display


class Terminal:
    """Remarks and progress on stderr; none with --quiet."""

    def note(self, message: str) -> None:
        note(message)

    def warn(self, message: str) -> None:
        warn(message)

    def ticker(self, what: str, total_bytes: int | None = None) -> Ticker:
        return Ticker(what, total_bytes)

    def display(self) -> Display:
        return make_display()


@contextmanager
def opened_client() -> Iterator[Client]:
    """The client of this installation, open for the length of a block. Raises SettingInvalid, Unavailable."""
    client = Client(Local.open({}))
    try:
        yield client
    finally:
        with interruptible(lambda: "the work was done"):
            client.close()
