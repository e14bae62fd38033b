"""How long things are kept: batches are deleted, a database is backed up."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, func, select

from storage.copies import copy_sqlite
from storage.database import Database
from storage.errors import BackupFailed, BatchNotFound, BatchOpen
from storage.states import DELETABLE_STATUSES, TERMINAL_STATUSES
from storage.tables import batch, deleted_batch, job


def delete_batch(db: Database, batch_id: str, *, overwrite: bool = True) -> int:
    """Delete an ended or still validating batch with its jobs and results; the number of jobs.

    SQLite keeps the space for later batches, overwritten: until `Database.empty_log`, its log takes as much as is
    deleted. Without `overwrite` that room is not needed, and texts stay in free pages until others take them. Raises
    BatchNotFound, BatchOpen or DiskFull.
    """
    with db.write() as connection, _deleting(db, connection, overwrite=overwrite):
        query = select(batch.c.status).where(batch.c.id == batch_id).with_for_update()
        status = connection.execute(query).scalar_one_or_none()
        if status is None:
            raise BatchNotFound(batch_id)
        if status not in DELETABLE_STATUSES:
            raise BatchOpen(batch_id, status)
        deleted = connection.execute(job.delete().where(job.c.batch_id == batch_id)).rowcount
        connection.execute(batch.delete().where(batch.c.id == batch_id))
        connection.execute(deleted_batch.insert().values(id=batch_id, deleted_at=db.now()))
    return deleted


@contextmanager
def _deleting(db: Database, connection: Connection, *, overwrite: bool) -> Iterator[None]:
    """The connection, which others will use, overwrites again afterwards."""
    if db.sqlite_file is None or overwrite:
        yield
        return
    connection.exec_driver_sql("PRAGMA secure_delete = FAST")
    try:
        yield
    finally:
        connection.exec_driver_sql("PRAGMA secure_delete = ON")


def prune(db: Database, older_than_s: float, *, overwrite: bool = True) -> list[str]:
    """Delete the batches that ended longer ago than `older_than_s` seconds; their ids, oldest end first.

    Each in a transaction of its own: nobody waits for all of them. `overwrite` as for `delete_batch`.
    """
    deleted = []
    for batch_id in ended_before(db, db.now() - older_than_s):
        # Retried or deleted by somebody else meanwhile.
        with suppress(BatchOpen, BatchNotFound):
            delete_batch(db, batch_id, overwrite=overwrite)
            deleted.append(batch_id)
    return deleted


def ended_before(db: Database, moment: float) -> list[str]:
    """The ids of the batches that ended before this Unix time, oldest end first."""
    ended_at = func.coalesce(batch.c.completed_at, batch.c.failed_at, batch.c.expired_at, batch.c.cancelled_at)
    query = (
        select(batch.c.id)
        .where(batch.c.status.in_(list(TERMINAL_STATUSES)), ended_at < moment)
        .order_by(ended_at, batch.c.id)
    )
    with db.read() as connection:
        return list(connection.execute(query).scalars())


def backup(db: Database, path: Path) -> None:
    """Write a copy of an SQLite database to `path`, which must not exist; others may use the database meanwhile.

    The copy is the state of one moment, and stands under its name only when it is whole. Raises BackupFailed.
    """
    source = db.sqlite_file
    if source is None:
        raise BackupFailed("only SQLite is backed up here: PostgreSQL has `pg_dump` for that")
    if path.exists():
        raise BackupFailed(f"{path} exists: a backup does not overwrite anything")
    try:
        _copy_whole(source, path)
    except (OSError, sqlite3.Error) as error:
        raise BackupFailed(f"no backup was written to {path}: {error}") from error


def take_mark(copy: Path) -> None:
    """The mark is the original's (`storage.identity`): no bookkeeper has written to the copy."""
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("UPDATE identity SET mark = NULL, mark_before = NULL")


def _copy_whole(source: Path, target: Path) -> None:
    # The file is private from its beginning: it holds prompts and answers.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    try:
        copy_sqlite(source, part)
        take_mark(part)
        os.fsync(handle)
        part.rename(target)
    finally:
        os.close(handle)
        part.unlink(missing_ok=True)
