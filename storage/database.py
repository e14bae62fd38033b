"""One database, SQLite or PostgreSQL: how it is opened, read and written."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from storage.addresses import sqlite_path
from storage.errors import (
    DatabaseBusy,
    DatabaseUnavailable,
    DatabaseUrlInvalid,
    DiskFull,
    DriverMissing,
    StorageError,
)
from storage.migrations import UPGRADES, Upgrade, prepare_schema
from storage.private_files import create_private

#: how long a writer waits for another process' transaction, in milliseconds
BUSY_TIMEOUT_MS = 10_000

#: of the driver, and of SQLite's own URIs
_SQLITE_PARAMETERS = {"timeout", "check_same_thread", "uri", "mode", "cache", "vfs", "immutable", "nolock", "psow"}

#: how SQLite names a cause, as far as it is one → what to do
_CURES = {
    "SQLITE_READONLY": "this user may not write the file or its folder: SHARDQ_DATABASE_URL",
    "SQLITE_CANTOPEN": "this user may not open the file, or not write its folder: SHARDQ_DATABASE_URL",
    "SQLITE_NOTADB": "the file is one of something else: let SHARDQ_DATABASE_URL name another",
    "SQLITE_CORRUPT": "`shardq doctor` reads all of it, `shardq restore` puts a backup in its place",
    "SQLITE_IOERR": "its disk fails, is full or is another machine's: SHARDQ_DATABASE_URL",
}

_WRITES = "shardq_writes"
_BARE = "shardq_bare"
_EXPECTED = "expected sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"


def parse_url(url: str) -> URL:
    """`url` with the driver we use filled in and `~` expanded.

    Raises DatabaseUrlInvalid; the message does not repeat the address, which may hold a password.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise DatabaseUrlInvalid(f"not a database address: {_EXPECTED}") from error
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.database in (None, "", ":memory:"):
            raise DatabaseUrlInvalid(f"SQLite needs a file, several processes share it: {_EXPECTED}")
        _refuse_unknown_parameters(url, parsed)
        return parsed.set(drivername="sqlite+pysqlite", database=str(Path(sqlite_path(url)).expanduser()))
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise DatabaseUrlInvalid(f"no database of kind {parsed.drivername!r} is supported: {_EXPECTED}")


def _refuse_unknown_parameters(url: str, parsed: URL) -> None:
    """A `?` that belongs to the path would cut it, and the database would be another file."""
    if "?" in url and not (parsed.query and parsed.query.keys() <= _SQLITE_PARAMETERS):
        raise DatabaseUrlInvalid(f"parameters that SQLite does not have: write `?` in a path as %3F; {_EXPECTED}")


class Database:
    """An open database. Safe to share between threads; each process opens its own."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    @classmethod
    def open(
        cls,
        url: str,
        *,
        clock: Callable[[], float] = time.time,
        upgrades: Sequence[Upgrade] = UPGRADES,
        busy_timeout_ms: int | None = None,
    ) -> Self:
        """Open the database at `url`, create its tables if there are none, and upgrade an older schema.

        `busy_timeout_ms`: how long a write to SQLite waits for another process' transaction. A new SQLite file belongs
        to its user alone (mode 0600), one that exists keeps its mode. An upgrade of an SQLite database leaves a backup
        file beside it, private too. Raises DatabaseUrlInvalid, DriverMissing, DatabaseUnavailable, SchemaInvalid or
        SchemaTooNew.
        """
        engine = _create_engine(parse_url(url), BUSY_TIMEOUT_MS if busy_timeout_ms is None else busy_timeout_ms)
        try:
            with _foreign_errors(engine):
                prepare_schema(engine, upgrades, writing=_write_transaction)
        except StorageError:
            engine.dispose()
            raise
        return cls(engine, clock)

    @property
    def address(self) -> str:
        """The address without its password."""
        return describe(self._engine)

    @property
    def place(self) -> str:
        """Where it is, for people on other machines: file and host, or server and name; never a user or password."""
        url = self._engine.url
        if self.sqlite_file is not None:
            return f"{self.sqlite_file.absolute()} on {socket.gethostname()}"
        port = f":{url.port}" if url.port else ""
        return f"postgresql://{url.host or url.query.get('host', '')}{port}/{url.database or ''}"

    @property
    def sqlite_file(self) -> Path | None:
        """The database's file; None if it is no SQLite database."""
        return Path(str(self._engine.url.database)) if self._engine.dialect.name == "sqlite" else None

    def num_bytes(self) -> int:
        """What the database takes on its disk, SQLite's journal included. Raises DatabaseUnavailable."""
        if self.sqlite_file is None:
            with self.read() as connection:
                return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
        journal = self.sqlite_file.with_name(f"{self.sqlite_file.name}-wal")
        return sum(file.stat().st_size for file in (self.sqlite_file, journal) if file.exists())

    def now(self) -> float:
        """Unix time in seconds."""
        return self._clock()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads. On SQLite it sees one state and never waits for writers."""
        with _foreign_errors(self._engine), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes: committed at the end of the block, rolled back by any exception.

        On SQLite it takes the write lock at once (a deferred transaction that reads first could not upgrade
        its lock, whatever the busy timeout). On PostgreSQL, lock the batch's row before its jobs' rows.
        """
        with _foreign_errors(self._engine), _write_transaction(self._engine) as connection:
            yield connection

    def empty_log(self) -> bool:
        """Move what stands in an SQLite file's write-ahead log into the file, and empty the log.

        False if somebody who reads kept that from happening until the busy timeout. PostgreSQL does it by itself.
        """
        if self.sqlite_file is None:
            return True
        with self._bare() as connection:
            (was_busy, *_) = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
        return not was_busy

    def shrink(self) -> None:
        """Write an SQLite file anew without its free pages. Needs room for two more copies of it.

        Others may read meanwhile, and wait with what they write. Raises DatabaseBusy, DiskFull.
        """
        with self._bare() as connection:
            connection.exec_driver_sql("VACUUM")

    @contextmanager
    def _bare(self) -> Iterator[Connection]:
        """A connection to SQLite outside of any transaction."""
        with _foreign_errors(self._engine), self._engine.connect().execution_options(**{_BARE: True}) as connection:
            yield connection

    def damage(self) -> str | None:
        """What is wrong with an SQLite file, and the way out; None if it is whole. Reads all of it."""
        if self.sqlite_file is None:
            return None
        with self.read() as connection:
            found = " ".join(str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()).split())
        if found == "ok":
            return None
        return f"{self.address} is damaged ({found}): take a backup, or save what is left with `sqlite3 … .recover`"

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def describe(engine: Engine) -> str:
    """The engine's address for messages: a path, or an address without its password."""
    if engine.dialect.name == "sqlite":
        return str(engine.url.database)
    # A password may also be one of the parameters.
    return engine.url.set(query={}).render_as_string(hide_password=True)


def _create_engine(url: URL, busy_timeout_ms: int) -> Engine:
    """An engine whose errors do not repeat parameters: those are prompts and answers."""
    if url.get_backend_name() == "sqlite":
        _make_file(url)
        engine = create_engine(url, hide_parameters=True, connect_args={"timeout": busy_timeout_ms / 1000})
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(url, hide_parameters=True, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise DriverMissing("PostgreSQL needs psycopg: pip install 'shardq[postgres]'") from error


def _make_file(url: URL) -> None:
    """Make a new database's directory and file before SQLite does, which would let the umask decide who may read."""
    path = Path(str(url.database))
    _make_directory(path.parent)
    # A URI may name no file at all (`mode=memory`), or one that must not be made (`mode=ro`).
    if "uri" not in url.query:
        create_private(path)


def _make_directory(directory: Path) -> None:
    try:
        # Prompts and answers are nobody else's business.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseUnavailable(f"cannot make the directory {directory}: {error.strerror}") from error


def _configure_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    # None: the driver starts no transaction of its own, `_begin_sqlite` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    # What is deleted or replaced is overwritten: prompts and answers do not stay behind in free pages.
    cursor.execute("PRAGMA secure_delete = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get(_BARE, False):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES, False) else "BEGIN")


@contextmanager
def _write_transaction(engine: Engine) -> Iterator[Connection]:
    with engine.connect().execution_options(**{_WRITES: True}) as connection, connection.begin():
        yield connection


@contextmanager
def _foreign_errors(engine: Engine) -> Iterator[None]:
    """Translate the driver's errors; a broken constraint is left to the caller, who knows what it means."""
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeout as error:
        raise DatabaseBusy(f"{describe(engine)}: all connections of this process are in use") from error
    except DBAPIError as error:
        raise _translate(describe(engine), error) from error


def _translate(where: str, error: DBAPIError) -> StorageError:
    original = error.orig
    lines = str(original).strip().splitlines()
    code = original.sqlite_errorname if isinstance(original, sqlite3.Error) else ""
    if code.startswith("SQLITE_BUSY"):
        return DatabaseBusy(f"{where} is locked by another process")
    if code == "SQLITE_FULL":
        return DiskFull(f"{where}: the disk is full: nothing was written; make room, what waits is kept")
    said = lines[0] if lines else type(original).__name__
    cure = next((cure for name, cure in _CURES.items() if code.startswith(name)), None)
    return DatabaseUnavailable(f"{where}: {said} ({cure})" if cure else f"{where}: {said}")
