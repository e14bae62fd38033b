"""Opening, upgrading and refusing databases."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from storage.batch_records import NewBatch
from storage.batches import begin_submission, get_batch, list_batches
from storage.database import Database
from storage.errors import DatabaseBusy, DatabaseUnavailable, SchemaInvalid, SchemaTooNew
from storage.migrations import FIRST_VERSION, UPGRADES, Upgrade

pytest_plugins = ["tests.integration.storage_databases"]


def _add_note(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE batch ADD COLUMN note VARCHAR"))
    connection.execute(text("UPDATE batch SET note = 'upgraded'"))


def _break(connection: Connection) -> None:
    connection.execute(text("UPDATE batch SET note = 'broken'"))
    connection.execute(text("SELECT nonsense FROM nowhere"))


ADD_NOTE = [*UPGRADES, Upgrade("batches have notes", _add_note)]
BREAK = [*ADD_NOTE, Upgrade("cannot work", _break)]
#: the version of an empty database, and of one with notes
NEWEST = FIRST_VERSION + len(UPGRADES)


def _note(db: Database) -> str:
    with db.read() as connection:
        return str(connection.execute(text("SELECT note FROM batch")).scalar_one())


def _version(db: Database) -> int:
    with db.read() as connection:
        return int(connection.execute(text("SELECT version FROM schema_version")).scalar_one())


def test_an_empty_database_gets_the_newest_schema_and_keeps_its_rows(url: str) -> None:
    with Database.open(url) as db:
        batch = begin_submission(db, NewBatch("hash")).batch
        assert _version(db) == NEWEST
    with Database.open(url) as db:
        assert get_batch(db, batch.id) == batch


def test_an_older_schema_is_upgraded_once(url: str) -> None:
    with Database.open(url) as db:
        begin_submission(db, NewBatch("hash"))

    for _ in range(2):
        with Database.open(url, upgrades=ADD_NOTE) as db:
            assert (_note(db), _version(db)) == ("upgraded", NEWEST + 1)


def test_an_upgrade_of_sqlite_leaves_a_backup_of_the_old_state(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.sqlite3'}"
    with Database.open(url) as db:
        batch = begin_submission(db, NewBatch("hash", "n")).batch
    assert not list(tmp_path.glob("*.bak"))

    Database.open(url, upgrades=ADD_NOTE).close()

    (backup,) = tmp_path.glob(f"x.sqlite3.v{NEWEST}-*.bak")
    with Database.open(f"sqlite:///{backup}") as db:
        assert get_batch(db, "n") == batch
        assert _version(db) == NEWEST


def test_an_upgrade_that_fails_changes_nothing(url: str) -> None:
    with Database.open(url) as db:
        begin_submission(db, NewBatch("hash"))

    with pytest.raises(DatabaseUnavailable):
        Database.open(url, upgrades=BREAK)

    with Database.open(url) as db:
        assert _version(db) == NEWEST
        assert len(list_batches(db)) == 1


def test_a_newer_schema_is_refused_and_both_versions_are_named(url: str) -> None:
    Database.open(url, upgrades=[*ADD_NOTE, Upgrade("nothing", lambda _: None)]).close()

    with pytest.raises(SchemaTooNew, match="knows versions up to") as caught:
        Database.open(url)
    assert (caught.value.found, caught.value.supported) == (NEWEST + 2, NEWEST)
    assert f"has schema version {NEWEST + 2}, this shardq knows versions up to {NEWEST}:" in str(caught.value)


def test_foreign_tables_with_our_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE job (x)")

    with pytest.raises(SchemaInvalid, match=r"holds tables \(job\) without a schema version"):
        Database.open(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    path.write_bytes(b"not a database, surely. " * 100)

    with pytest.raises(DatabaseUnavailable, match=r"x\.sqlite3: file is not a database"):
        Database.open(f"sqlite:///{path}")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseUnavailable, match=r"cannot make the directory .*/file/data"):
        Database.open(f"sqlite:///{tmp_path}/file/data/x.sqlite3")


def test_the_data_directory_is_private(tmp_path: Path) -> None:
    Database.open(f"sqlite:///{tmp_path}/a/b/x.sqlite3").close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory that others may read, and a umask that lets them read what is made there."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def test_a_new_database_is_private_where_others_may_read_its_directory(shared: Path) -> None:
    with Database.open(f"sqlite:///{shared}/x.sqlite3") as db:
        begin_submission(db, NewBatch("hash"))
        assert modes(shared) == dict.fromkeys(["x.sqlite3", "x.sqlite3-wal", "x.sqlite3-shm"], 0o600)


def test_a_new_database_behind_a_link_is_private(shared: Path) -> None:
    (shared / "link").symlink_to(shared / "x.sqlite3")
    Database.open(f"sqlite:///{shared}/link").close()
    assert modes(shared)["x.sqlite3"] == 0o600


def test_a_database_that_exists_keeps_its_mode(shared: Path) -> None:
    path = shared / "x.sqlite3"
    path.touch()
    path.chmod(0o660)
    with Database.open(f"sqlite:///{path}") as db:
        begin_submission(db, NewBatch("hash"))
        assert set(modes(shared).values()) == {0o660}
    path.chmod(0o644)
    with Database.open(f"sqlite:///{path}") as db:
        assert len(list_batches(db)) == 1
    assert modes(shared) == {"x.sqlite3": 0o644}


def test_the_backup_of_an_upgrade_is_private(shared: Path) -> None:
    path = shared / "x.sqlite3"
    Database.open(f"sqlite:///{path}").close()
    path.chmod(0o644)
    Database.open(f"sqlite:///{path}", upgrades=ADD_NOTE).close()
    (backup,) = shared.glob("*.bak")
    assert modes(shared) == {"x.sqlite3": 0o644, backup.name: 0o600}


def test_a_file_that_cannot_be_made_is_told_as_sqlite_tells_it(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable, match="unable to open database file"):
        Database.open(f"sqlite:///{tmp_path}/{'x' * 300}")


@pytest.mark.filterwarnings("ignore:Selection of the SingletonThreadPool")
def test_a_database_in_memory_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Database.open("sqlite:///file:name?mode=memory&cache=shared&uri=true") as db:
        assert list_batches(db) == []
        assert modes(tmp_path) == {}


def test_a_database_opened_for_reading_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = "sqlite:///file:x.sqlite3?mode=ro&uri=true"
    with pytest.raises(DatabaseUnavailable, match="unable to open database file"):
        Database.open(address)
    assert modes(tmp_path) == {}
    Database.open("sqlite:///x.sqlite3").close()
    with Database.open(address) as db:
        assert list_batches(db) == []


@pytest.mark.parametrize("address", ["me:secret@127.0.0.1:1/shardq?", "127.0.0.1:1/shardq?user=me&password=secret&"])
def test_an_unreachable_server_is_an_error_without_the_password(address: str) -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        Database.open(f"postgresql://{address}connect_timeout=2")
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_sqlite_is_in_wal_mode_and_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    with Database.open(f"sqlite:///{tmp_path}/x.sqlite3") as db:
        with db.write() as writer:
            assert writer.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
            writer.execute(text("INSERT INTO counter VALUES ('a', 1)"))
            with db.read() as reader:
                assert reader.execute(text("SELECT count(*) FROM counter")).scalar_one() == 0
        with db.read() as reader:
            assert reader.execute(text("SELECT count(*) FROM counter")).scalar_one() == 1


def test_a_lock_held_too_long_is_reported_as_busy(tmp_path: Path) -> None:
    with (
        Database.open(f"sqlite:///{tmp_path}/x.sqlite3", busy_timeout_ms=100) as db,
        db.write(),
        pytest.raises(DatabaseBusy, match="is locked by another process"),
    ):
        begin_submission(db, NewBatch("hash"))


def test_read_then_write_from_many_threads_never_fails(url: str) -> None:
    with Database.open(url) as db:
        with db.write() as connection:
            connection.execute(text("INSERT INTO counter VALUES ('a', 0)"))

        def add() -> None:
            for _ in range(25):
                with db.write() as connection:
                    lock = "" if connection.dialect.name == "sqlite" else " FOR UPDATE"
                    value = connection.execute(text(f"SELECT value FROM counter{lock}")).scalar_one()
                    connection.execute(text("UPDATE counter SET value = :new"), {"new": value + 1})

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with db.read() as connection:
            assert connection.execute(text("SELECT value FROM counter")).scalar_one() == 100


def _open_and_submit(url: str) -> str:
    with Database.open(url, upgrades=ADD_NOTE) as db:
        return begin_submission(db, NewBatch("hash")).batch.id


def test_many_processes_may_open_an_empty_database_at_once(url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        ids = list(pool.map(_open_and_submit, [url] * 3))

    with Database.open(url, upgrades=ADD_NOTE) as db:
        assert {batch.id for batch in list_batches(db)} == set(ids)


def test_errors_do_not_repeat_prompts(url: str) -> None:
    with Database.open(url) as db, pytest.raises(DatabaseUnavailable) as caught, db.write() as connection:
        connection.execute(text("SELECT nonsense FROM nowhere WHERE a = :prompt"), {"prompt": "private"})
    assert "private" not in str(caught.value)
    assert "private" not in str(caught.value.__cause__)
