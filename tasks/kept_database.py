"""The database that the bookkeeper keeps: outcomes of what is queued from any other one never reach it.

The bookkeeper publishes which one it is on the queue server, where it stays when no bookkeeper is at work. Whoever
queues jobs compares it with the database they stand in.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

import redis
from redis.exceptions import NoPermissionError

from relay.plain import from_plain
from storage.database import Database
from storage.identity import Identity, read_identity, renew_mark
from tasks import keys
from tasks.errors import OtherDatabase
from tasks.lease import ALLOW_OOM

log = logging.getLogger(__name__)

#: seconds between two new marks: a copy that is older cannot be taken for the database itself
MARK_S = 30.0

# Small, and replaced: a server short of memory must not make the database look like another one.
_PUBLISH = ALLOW_OOM + "return redis.call('SET', KEYS[1], ARGV[1])"


@dataclass(frozen=True, slots=True)
class KeptDatabase:
    """What the bookkeeper says of its database."""

    id: str
    #: one of the last two that it wrote there
    mark: str
    #: file and host, or server and name
    place: str


def publish(client: redis.Redis, database: Database) -> None:
    """Tell which database is kept, under a new mark; for the bookkeeper that holds the tenure.

    A mark that was written but never published is published first, so that the database always has the published one.
    """
    known, own = published(client), read_identity(database)
    was_published = known is None or known.id != own.id or known.mark != own.mark_before
    mark = (renew_mark(database) if was_published or own.mark is None else own).mark
    if known is not None and known.id != own.id:
        log.warning(
            "until now database %s at %s was kept, from now on %s at %s: outcomes of jobs of that one are put aside",
            *(known.id, known.place, own.id, database.place),
        )
    kept = KeptDatabase(own.id, str(mark), database.place)
    client.eval(_PUBLISH, 1, keys.DATABASE, json.dumps(asdict(kept)))


def is_new_here(client: redis.Redis, database: Database) -> bool:
    """Before `publish`: whether the database is not as the last bookkeeper left it. It is new, or a restored backup."""
    known, own = published(client), read_identity(database)
    return known is None or known.id != own.id or known.mark not in (own.mark, own.mark_before)


def published(client: redis.Redis) -> KeptDatabase | None:
    """What a bookkeeper published last; None if none ever did."""
    value = client.get(keys.DATABASE)
    if value is None:
        return None
    try:
        return from_plain(KeptDatabase, json.loads(value))
    except (ValueError, TypeError, RecursionError):
        return None  # of another version, or somebody else's: as if nobody had said anything


def difference(client: redis.Redis, database: Database) -> str | None:
    """Why outcomes of this database's jobs will not reach it, naming both databases; None if they will.

    They will as well if no bookkeeper has ever said which database it keeps.
    """
    # In this order: what is published stands in the database already.
    kept, at_work = published(client), bool(client.exists(keys.BOOKKEEPER))
    own = read_identity(database)
    if kept is None or not _is_other(kept, own, at_work=at_work):
        return None
    who = "the bookkeeper keeps" if at_work else "the bookkeeper that ran last kept"
    if kept.id == own.id:
        return f"{who} database {kept.id} at {kept.place}, and {database.place} is a copy of it"
    return f"{who} database {kept.id} at {kept.place}, and this is {own.id} at {database.place}"


def _is_other(kept: KeptDatabase, own: Identity, *, at_work: bool) -> bool:
    """Without a bookkeeper at work the same id is enough: a backup that was restored waits for its first mark."""
    return kept.id != own.id or (at_work and kept.mark not in (own.mark, own.mark_before))


def refuse_other_database(client: redis.Redis, database: Database) -> str | None:
    """Before jobs of this database are queued: raise OtherDatabase if their outcomes would not reach it.

    Returns what to tell the user if this account may not ask.
    """
    try:
        found = difference(client, database)
    except NoPermissionError:
        return (
            "this account may not ask which database the bookkeeper keeps (its rights are of an earlier version: "
            f"`shardq server update` on the host): results come only if that is {database.place}"
        )
    if found is None:
        return None
    raise OtherDatabase(
        f"not queued, the results would go elsewhere: {found}; submit on that host (over ssh), set SHARDQ_DATABASE_URL "
        "to that database, or start `shardq bookkeeper` with this one"
    )
