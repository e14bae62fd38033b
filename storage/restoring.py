"""A backup in the place of an SQLite database."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from storage.addresses import sqlite_url
from storage.copies import copy_sqlite
from storage.database import Database
from storage.errors import RestoreFailed
from storage.retention import take_mark

#: what SQLite keeps beside a file
_COMPANIONS = ("", "-wal", "-shm")


def restore(backup: Path, target: Path) -> Path | None:
    """Put what `backup` holds in the place of the database `target`, under the newest schema; `backup` stays as it is.

    What stood there is kept beside it, as `<file>.before-restore-<time>.bak`: returns where, None if nothing did. The
    database has the backup's id, and no mark until a bookkeeper is started with it. No bookkeeper may be at work on
    `target`. Raises RestoreFailed, SchemaTooNew or SchemaInvalid, and the database is as it was then.
    """
    if not backup.is_file():
        raise RestoreFailed(f"{backup} is no file")
    if target.exists() and target.samefile(backup):
        raise RestoreFailed(f"{backup} is the database itself")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=target.parent) as corner:
            prepared = Path(corner) / "prepared.sqlite3"
            _prepare(backup, prepared)
            kept = _keep(target)
            copy_sqlite(prepared, target)
            return kept
    except (OSError, sqlite3.Error) as error:
        raise RestoreFailed(f"{backup} was not restored to {target}: {error}") from error


def _prepare(backup: Path, prepared: Path) -> None:
    """A whole copy of the backup with our newest schema. Raises what is wrong with it."""
    copy_sqlite(backup, prepared)
    with closing(sqlite3.connect(prepared)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "schema_version" not in tables:
        raise RestoreFailed(f"{backup} is no database of shardq's")
    with Database.open(sqlite_url(prepared)) as database:
        if damage := database.damage():
            raise RestoreFailed(damage.replace(str(prepared), str(backup)))
    take_mark(prepared)


def _keep(target: Path) -> Path | None:
    """Copy the present database; one that cannot be read is moved, with what SQLite keeps beside it."""
    if not target.exists():
        return None
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    kept = target.with_name(f"{target.name}.before-restore-{stamp}.bak")
    if kept.exists():
        raise RestoreFailed(f"{kept} exists: wait a second")
    try:
        copy_sqlite(target, kept)
    except sqlite3.DatabaseError:
        kept.unlink(missing_ok=True)
        for ending in _COMPANIONS:
            path = Path(f"{target}{ending}")
            if path.exists():
                path.rename(f"{kept}{ending}")
    return kept
