"""What the bookkeeper could not record and kept on the queue server: outcomes of unknown jobs, and unreadable records.

Whoever has the jobs in a database takes the outcomes from here into it; the others stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from storage.database import Database
from storage.job_records import Fate
from storage.outcomes import record_outcomes
from tasks import keys
from tasks.errors import RecordInvalid
from tasks.generation import Outcome
from tasks.recorder import outcome_row, store
from tasks.results import decode

#: entries read at a time: those with log probabilities are megabytes each
_PAGE = 25


@dataclass(frozen=True, slots=True)
class Rejected:
    """One kept entry."""

    stream: str
    entry: bytes
    #: None: it cannot be read as one
    outcome: Outcome | None
    #: why it was not recorded
    reason: str
    #: as it came, for what is no outcome
    text: str

    @property
    def at(self) -> float:
        """Unix time by the server's clock at which it was put aside."""
        return int(self.entry.split(b"-")[0]) / 1000


def num_rejected(client: redis.Redis) -> tuple[int, int]:
    """How many outcomes of unknown jobs are kept, and how many other records."""
    pipeline = client.pipeline(transaction=False)
    pipeline.xlen(keys.UNKNOWN)
    pipeline.xlen(keys.REJECTED)
    unknown, others = pipeline.execute()
    return int(unknown), int(others)


def rejected(client: redis.Redis) -> Iterator[Rejected]:
    """All of them, oldest first within their kind, in bounded memory."""
    for stream in (keys.UNKNOWN, keys.REJECTED):
        for page in _pages(client, stream):
            yield from page


def take_in(client: redis.Redis, database: Database) -> Counter[Fate]:
    """Record the outcomes whose jobs are in this database and remove them; what became of them.

    One that finds its attempt ended, or another attempt, is removed, too: its job has what it needs. What is of no job
    here stays, for the database that has it.
    """
    fates: Counter[Fate] = Counter()
    for stream in (keys.UNKNOWN, keys.REJECTED):
        for page in _pages(client, stream):
            rows = [(item.entry, outcome_row(item.outcome)) for item in page if item.outcome is not None]
            found = store(rows, lambda rows: record_outcomes(database, rows).fates)
            fates.update(found.values())
            remove(client, stream, [entry for entry, fate in found.items() if fate is not Fate.UNKNOWN])
    return fates


def remove(client: redis.Redis, stream: str, entries: list[bytes]) -> None:
    """Drop these entries."""
    if entries:
        client.xdel(stream, *entries)


def _pages(client: redis.Redis, stream: str) -> Iterator[list[Rejected]]:
    start = "-"
    while True:
        entries: list[tuple[bytes, dict[bytes, bytes]]] = list(client.xrange(stream, start, "+", count=_PAGE))  # type: ignore[arg-type]
        if not entries:
            return
        yield [_read(stream, entry, fields) for entry, fields in entries]
        start = f"({entries[-1][0].decode()}"


def _read(stream: str, entry: bytes, fields: dict[bytes, bytes]) -> Rejected:
    text = fields.get(b"json", b"").decode(errors="backslashreplace")
    if fields.get(b"kind") == b"message":
        return Rejected(stream, entry, None, "a message that names no job", text)
    try:
        content = decode(entry, fields).content
    except RecordInvalid as error:
        return Rejected(stream, entry, None, str(error), text)
    if not isinstance(content, Outcome):
        return Rejected(stream, entry, None, "the database could not hold it", text)
    reason = "no such job" if stream == keys.UNKNOWN else "the database could not hold it"
    return Rejected(stream, entry, content, reason, text)
