"""Access to the database for one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cli.errors import ExitCode
from cli.interruption import interruptible
from storage.batch_records import Counts
from storage.database import Database
from storage.settings import StorageSettings


@contextmanager
def opened(busy_timeout_ms: int | None = None) -> Iterator[Database]:
    """The configured database, open for the length of a block; see `Database.open`."""
    database = Database.open(StorageSettings().database_url, busy_timeout_ms=busy_timeout_ms)
    try:
        yield database
    finally:
        with interruptible(lambda: "the work was done"):
            database.close()


def exit_code(counts: Counts) -> ExitCode:
    """OK only if every job has ended and succeeded."""
    if counts.num_open:
        return ExitCode.UNFINISHED
    return ExitCode.OK if counts.completed == counts.total else ExitCode.JOBS_FAILED
