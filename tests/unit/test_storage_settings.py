"""The database address: where it comes from, what it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from storage.addresses import sqlite_url
from storage.database import Database, parse_url
from storage.errors import DatabaseUrlInvalid
from storage.settings import StorageSettings


def test_the_default_is_a_file_in_the_users_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDQ_DATABASE_URL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert StorageSettings().database_url == "sqlite:////data/shardq/shardq.sqlite3"

    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert StorageSettings().database_url == "sqlite:////home/me/.local/share/shardq/shardq.sqlite3"


def test_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_DATABASE_URL", "postgresql://me@host/shardq")
    assert StorageSettings().database_url == "postgresql://me@host/shardq"


def test_a_bad_address_is_refused_with_the_variables_name_and_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDQ_DATABASE_URL", "mysql://me:secret@host/shardq")
    with pytest.raises(ValidationError, match="SHARDQ_DATABASE_URL: no database of kind 'mysql'") as caught:
        StorageSettings()
    assert "secret" not in str(caught.value)


def test_a_password_is_not_in_the_settings_repr() -> None:
    assert "secret" not in repr(StorageSettings(database_url="postgresql://me:secret@host/shardq"))


@pytest.mark.parametrize("url", ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://host/x"])
def test_an_address_we_cannot_open_is_refused(url: str) -> None:
    with pytest.raises(DatabaseUrlInvalid, match="expected sqlite:///PATH or postgresql://"):
        parse_url(url)


@pytest.mark.parametrize("name", ["what?", "50%", "a%3Fb", "c#", "#%?&=+;@:~'\" é", "x?uri=true"])
def test_a_path_of_any_characters_is_the_file_of_its_address(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "shardq.sqlite3"
    with Database.open(sqlite_url(path)) as database:
        assert database.sqlite_file == path
    assert path.is_file()
    assert [found.name for found in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("url", ["sqlite:////data/w?1/x.sqlite3", "sqlite:////data/x?", "sqlite:////data/w?a=1/x"])
def test_a_path_that_a_question_mark_would_cut_is_refused(url: str) -> None:
    with pytest.raises(DatabaseUrlInvalid, match="as %3F"):
        parse_url(url)


def test_short_forms_are_filled_in() -> None:
    assert parse_url("postgres://host/x").drivername == "postgresql+psycopg"
    assert parse_url("sqlite:///~/x.db").database == str(Path.home() / "x.db")
