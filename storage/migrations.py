"""The schema's version: tables are created, upgraded after a backup, or refused if newer than we are."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from storage import tables
from storage.copies import copy_sqlite
from storage.errors import DatabaseUnavailable, SchemaInvalid, SchemaTooNew

#: version of the tables before any upgrade
FIRST_VERSION = 1
#: advisory lock under which PostgreSQL's schema is made; any constant nobody else uses
_SCHEMA_LOCK = 5_741_902_113


def new_id() -> str:
    """An id for a database: `db_` and 16 hexadecimal digits."""
    return f"db_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """One step from a version to the next."""

    description: str
    #: changes tables and data inside the caller's transaction
    apply: Callable[[Connection], None]


def _add_wire_dtype(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE job ADD COLUMN wire_dtype VARCHAR"))


#: version 3: stops, deadlines, reuse. SQLite adds columns behind the large texts, where they are read more slowly than
#: in a database of this version; copying every row for that would need the space of a second database.
_LIFE_CYCLE = (
    # Nobody could choose a priority before, and 0 has become the most urgent.
    "UPDATE batch SET priority = 5",
    "ALTER TABLE job ADD COLUMN expires_at DOUBLE PRECISION",
    "ALTER TABLE job ADD COLUMN stop_reason VARCHAR",
    "ALTER TABLE job ADD COLUMN stop_at DOUBLE PRECISION",
    "ALTER TABLE job ADD COLUMN request_key VARCHAR",
    "ALTER TABLE job ADD COLUMN profile_key VARCHAR",
    "ALTER TABLE job ADD COLUMN reused_from VARCHAR",
    "DROP INDEX job_by_state",
    "CREATE INDEX job_by_state ON job (batch_id, state, completion_tokens, reused_from)",
    "DROP INDEX job_in_flight",
    "CREATE INDEX job_in_flight ON job (model, batch_id) WHERE state IN ('queued', 'running')",
    "CREATE INDEX job_stopping ON job (stop_at) WHERE stop_reason IS NOT NULL AND state IN ('queued', 'running')",
    "CREATE INDEX job_expiring ON job (expires_at) WHERE expires_at IS NOT NULL AND stop_reason IS NULL "
    "AND state IN ('queued', 'running', 'waiting')",
    "CREATE INDEX job_reusable ON job (request_key) WHERE request_key IS NOT NULL AND reused_from IS NULL "
    "AND state = 'completed'",
)


def _add_life_cycle(connection: Connection) -> None:
    for statement in _LIFE_CYCLE:
        connection.execute(text(statement))


#: version 4
_CHOICES = ("ALTER TABLE job ADD COLUMN choices TEXT", "ALTER TABLE job ADD COLUMN logprobs TEXT")


def _add_choices(connection: Connection) -> None:
    for statement in _CHOICES:
        connection.execute(text(statement))


def _add_rounds_by_draft(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE job ADD COLUMN rounds_by_draft TEXT"))


def _add_idle_time(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE batch ADD COLUMN idle_s DOUBLE PRECISION NOT NULL DEFAULT 0"))


#: version 7
_IDENTITY = (
    "CREATE TABLE identity (id VARCHAR NOT NULL PRIMARY KEY, mark VARCHAR, mark_before VARCHAR)",
    "CREATE TABLE deleted_batch (id VARCHAR NOT NULL PRIMARY KEY, deleted_at DOUBLE PRECISION NOT NULL)",
)


def _add_identity(connection: Connection) -> None:
    for statement in _IDENTITY:
        connection.execute(text(statement))
    connection.execute(text("INSERT INTO identity (id) VALUES (:id)"), {"id": new_id()})


#: version 8
_METADATA = ("ALTER TABLE batch ADD COLUMN metadata TEXT", "ALTER TABLE job ADD COLUMN metadata TEXT")


def _add_metadata(connection: Connection) -> None:
    for statement in _METADATA:
        connection.execute(text(statement))


#: in order; the first leads from version 1 to version 2. `tables` always describes the newest version; an upgrade is
#: written in SQL of its own, which stays as it is.
UPGRADES: tuple[Upgrade, ...] = (
    Upgrade("jobs record their wire dtype", _add_wire_dtype),
    Upgrade("stops, deadlines and reuse of results", _add_life_cycle),
    Upgrade("several completions of a job, and log probabilities", _add_choices),
    Upgrade("rounds by length of the draft and tokens accepted", _add_rounds_by_draft),
    Upgrade("time between a batch's end and its retry", _add_idle_time),
    Upgrade("an id of the database, and the ids of deleted batches", _add_identity),
    Upgrade("metadata of batches and jobs", _add_metadata),
)

WriteTransaction = Callable[[Engine], AbstractContextManager[Connection]]


def prepare_schema(engine: Engine, upgrades: Sequence[Upgrade], writing: WriteTransaction) -> None:
    """Bring the database to the version that `upgrades` lead to; all steps in one transaction.

    `writing` opens a transaction that holds the write lock from its beginning. Raises SchemaInvalid for
    tables without a version, SchemaTooNew for a version we do not know; the database is unchanged then.
    """
    target = FIRST_VERSION + len(upgrades)
    with engine.connect() as connection:
        version = _read_version(connection, target)
    if version == target:
        return
    with writing(engine) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        # Another process may have been here since.
        version = _read_version(connection, target)
        if version is None:
            tables.metadata.create_all(connection)
            connection.execute(tables.schema_version.insert().values(version=target))
            connection.execute(tables.identity.insert().values(id=new_id()))
        elif version < target:
            _back_up(engine, version)
            for upgrade in upgrades[version - FIRST_VERSION :]:
                upgrade.apply(connection)
            connection.execute(tables.schema_version.update().values(version=target))


def _read_version(connection: Connection, supported: int) -> int | None:
    """The stored version, at most `supported`; None if the database is empty."""
    where = str(connection.engine.url.database)
    present = set(inspect(connection).get_table_names())
    if tables.schema_version.name not in present:
        foreign = sorted(present & set(tables.metadata.tables))
        if foreign:
            raise SchemaInvalid(f"{where} holds tables ({', '.join(foreign)}) without a schema version")
        return None
    version = connection.execute(tables.schema_version.select()).scalar_one()
    if version > supported:
        raise SchemaTooNew(where, version, supported)
    if version < FIRST_VERSION:
        raise SchemaInvalid(f"{where} has schema version {version}, which never existed")
    return int(version)


def _back_up(engine: Engine, version: int) -> None:
    """Copy an SQLite database to `<file>.v<version>-<time>.bak`. PostgreSQL has its own tools for that."""
    if engine.dialect.name != "sqlite":
        return
    source = Path(str(engine.url.database))
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = source.with_name(f"{source.name}.v{version}-{stamp}.bak")
    # The caller holds the write lock, so this reader's copy is the state before the upgrade.
    try:
        copy_sqlite(source, target)
    except sqlite3.Error as error:
        raise DatabaseUnavailable(f"not upgraded: the backup {target} cannot be written: {error}") from error
