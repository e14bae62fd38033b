"""The database address: where it comes from, what it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from storage.database import parse_url
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


def test_short_forms_are_filled_in() -> None:
    assert parse_url("postgres://host/x").drivername == "postgresql+psycopg"
    assert parse_url("sqlite:///~/x.db").database == str(Path.home() / "x.db")
