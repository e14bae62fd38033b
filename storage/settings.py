"""Where the database is; the only reader of this package's environment variable."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from storage.addresses import sqlite_url
from storage.database import parse_url
from storage.errors import DatabaseUrlInvalid


def default_database_url() -> str:
    """`shardq/shardq.sqlite3` in the user's data directory (`$XDG_DATA_HOME`, else `~/.local/share`)."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return sqlite_url(Path(home) / "shardq" / "shardq.sqlite3")


class StorageSettings(BaseSettings):
    """Settings of the database. The field is also the environment variable `SHARDQ_DATABASE_URL`."""

    # The address may hold a password: it is kept out of reprs and error messages.
    model_config = SettingsConfigDict(
        env_prefix="SHARDQ_", frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True
    )

    #: `sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME`
    database_url: str = Field(default_factory=default_database_url, repr=False)

    @field_validator("database_url")
    @classmethod
    def _can_be_opened(cls, value: str) -> str:
        try:
            parse_url(value)
        except DatabaseUrlInvalid as error:
            raise ValueError(f"SHARDQ_DATABASE_URL: {error}") from error
        return value
