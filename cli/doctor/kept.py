"""What `shardq doctor` finds of the bookkeeper's database, and of results that it could not record."""

from __future__ import annotations

from collections.abc import Iterator

import redis
from redis.exceptions import NoPermissionError

from cli.database import opened
from cli.doctor.findings import Finding, failed, ok, warning
from cli.output import counted
from storage.errors import StorageError
from tasks.kept_database import difference, published
from tasks.rejected import num_rejected


def check_kept(client: redis.Redis) -> Iterator[Finding]:
    """Whether the bookkeeper keeps this command's database, and what it put aside. The queue server answers."""
    try:
        yield from _kept(client)
        yield from _rejected(client)
    except NoPermissionError:
        text = "this account may not ask which database the bookkeeper keeps"
        yield warning("kept", f"{text} (a client's may: `shardq server update` on the host)")


def _kept(client: redis.Redis) -> Iterator[Finding]:
    kept = published(client)
    if kept is None:
        return
    try:
        with opened() as database:
            other = difference(client, database)
    except StorageError:
        return  # the database's own check says it
    if other:
        text = f"{other}: results of jobs queued from here would go there"
        yield failed("kept", f"{text}; set SHARDQ_DATABASE_URL, or work on that host")
    else:
        yield ok("kept", f"the bookkeeper's database is this one, {kept.id}")


def _rejected(client: redis.Redis) -> Iterator[Finding]:
    unknown, others = num_rejected(client)
    if unknown or others:
        parts = [counted(unknown, "outcome") + " of no job in the bookkeeper's database"] if unknown else []
        parts += [counted(others, "record") + " that cannot be read"] if others else []
        yield warning("rejected", f"{' and '.join(parts)}: `shardq rejected` shows them")
    else:
        yield ok("rejected", "none: every result found its job")
