"""Fixtures: an empty database of each supported kind, its address, and the clock that it tells.

PostgreSQL is a throwaway server of our own, reached through a socket in a temporary directory. Without its
binaries (they come from the system, not from PyPI, so CI cannot count on them) those tests are skipped.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from storage.database import Database

#: when the clock stands at the beginning, seconds since 1970
START = 1_700_000_000.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class PostgresServer:
    """A running server; each test gets a schema of its own in the one database."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def url(self, schema: str) -> str:
        options = f"host={self._directory}&options=-csearch_path%3D{schema}"
        return f"postgresql+psycopg://postgres@/postgres?{options}"

    def is_ready(self) -> bool:
        engine = create_engine(self.url("public"))
        try:
            with engine.connect():
                return True
        except Exception:  # noqa: BLE001 - whatever it says, it is not ready
            return False
        finally:
            engine.dispose()

    def new_database(self) -> str:
        """The address of a new, empty database."""
        self._count += 1
        name = f"test_{self._count}"
        engine = create_engine(self.url("public"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return f"postgresql://postgres@/{name}?host={self._directory}"

    def new_schema(self) -> str:
        """The address of a new, empty schema."""
        self._count += 1
        name = f"test_{self._count}"
        engine = create_engine(self.url("public"))
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {name}"))
        engine.dispose()
        return self.url(name)


def _binaries() -> Path | None:
    """The directory with `initdb` and `postgres` of one version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    found += [Path(path) for path in [shutil.which("postgres")] if path]
    usable = [path.parent for path in found if (path.parent / "initdb").exists()]
    return usable[-1] if usable else None


def _user() -> str | None:
    """Who runs the server: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    binaries = _binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server on this machine: install the package `postgresql` to run this test")
    pytest.importorskip("psycopg")
    user = _user()
    directory = Path(tempfile.mkdtemp(prefix="shardq-pg-"))
    if user is not None:
        shutil.chown(directory, user)
    data = directory / "data"
    initdb = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run([str(part) for part in initdb], user=user, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "unix_socket_permissions=0777"]
    command = [str(binaries / "postgres"), "-D", str(data), "-k", str(directory), *options]
    server = PostgresServer(directory)
    log = (directory / "log").open("wb")
    process = subprocess.Popen(command, user=user, cwd=directory, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not server.is_ready():
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.1)
        yield server
    finally:
        # At once, without a checkpoint.
        process.send_signal(signal.SIGQUIT)
        process.wait(timeout=30)
        log.close()
        shutil.rmtree(directory)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database; a test with it runs once per kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shardq.sqlite3'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_schema()


@pytest.fixture
def clock() -> Clock:
    """What the time is."""
    return Clock()


@pytest.fixture
def db(url: str, clock: Clock) -> Iterator[Database]:
    """An empty database, open."""
    with Database.open(url, clock=clock) as database:
        yield database
