"""Which database it is: an id that copies share, and a mark that they fall behind with."""

from __future__ import annotations

import re
from pathlib import Path

from storage.database import Database
from storage.identity import read_identity, renew_mark
from storage.retention import backup

pytest_plugins = ["tests.integration.storage_databases"]


def test_every_database_has_an_id_of_its_own_that_stays(url: str, tmp_path: Path) -> None:
    with Database.open(url) as first:
        made = read_identity(first)
    with Database.open(url) as again, Database.open(f"sqlite:///{tmp_path / 'other.sqlite3'}") as other:
        assert read_identity(again) == made
        assert re.fullmatch("db_[0-9a-f]{16}", made.id)
        assert (made.mark, made.mark_before) == (None, None)
        assert read_identity(other).id != made.id


def test_a_new_mark_is_another_one_and_the_one_before_is_known(db: Database) -> None:
    first, second = renew_mark(db), renew_mark(db)
    assert second == read_identity(db)
    assert first.mark is not None
    assert (second.id, second.mark_before) == (first.id, first.mark)
    assert second.mark not in (None, first.mark)


def test_a_backup_has_the_id_and_no_mark(tmp_path: Path) -> None:
    with Database.open(f"sqlite:///{tmp_path / 'jobs.sqlite3'}") as source:
        renew_mark(source)
        own = renew_mark(source)
        backup(source, tmp_path / "copy.sqlite3")
    with Database.open(f"sqlite:///{tmp_path / 'copy.sqlite3'}") as copy:
        found = read_identity(copy)
    assert (found.id, found.mark, found.mark_before) == (own.id, None, None)


def test_a_place_names_file_or_server_and_no_password(url: str, tmp_path: Path) -> None:
    with Database.open(url) as database:
        if database.sqlite_file is None:
            assert database.place.startswith("postgresql://")
            assert "postgres@" not in database.place
        else:
            assert database.place.startswith(f"{tmp_path}/shardq.sqlite3 on ")
