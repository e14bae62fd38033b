"""Settings of the command line, and how it tells the other packages theirs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from storage.addresses import sqlite_url


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/shardq`, else `~/.local/share/shardq`: where the database is by default, too."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "shardq"


class CliSettings(BaseSettings):
    """Each field is also the environment variable `SHARDQ_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="SHARDQ_", frozen=True, extra="ignore", env_ignore_empty=True)

    #: database, embedded Redis and logs of this machine
    data_dir: Path = Field(default_factory=default_data_dir)

    @property
    def database_url(self) -> str:
        """The database of this data directory."""
        return sqlite_url(self.data_dir / "shardq.sqlite3")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services of an installation are."""

    broker_url: str
    relay_url: str
    database_url: str

    def environment(self) -> dict[str, str]:
        """These addresses as the environment variables that every package reads."""
        return {
            "SHARDQ_BROKER_URL": self.broker_url,
            "SHARDQ_RELAY_URL": self.relay_url,
            "SHARDQ_DATABASE_URL": self.database_url,
        }


class RunningStack:
    """The note that a running `shardq up` leaves in its data directory, so that other terminals find it."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "up.json"

    def write(self, addresses: Addresses) -> None:
        """Leave the note. It names passwords if the addresses do, so only the user may read it."""
        text = json.dumps({"pid": os.getpid(), **asdict(addresses)})
        temporary = self._path.with_suffix(".new")
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._path)

    def remove(self) -> None:
        """Take the note back."""
        self._path.unlink(missing_ok=True)

    def read(self) -> Addresses | None:
        """The addresses of the stack that runs now, or None."""
        try:
            note = json.loads(self._path.read_text(encoding="utf-8"))
            pid = note.pop("pid")
            addresses = Addresses(**note)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # no note, or one cut short: no running stack to be found
        return addresses if _is_alive(pid) else None


def addresses_in(settings: CliSettings) -> dict[str, str]:
    """Variables: the addresses of the `shardq up` that runs in the data directory, else of its database alone."""
    addresses = RunningStack(settings.data_dir).read()
    return addresses.environment() if addresses else {"SHARDQ_DATABASE_URL": settings.database_url}


def use_data_dir(settings: CliSettings) -> frozenset[str]:
    """Point this process at the data directory's database and running `shardq up`; the variables that were set.

    Through the environment, which every package and every child process reads; what stands there wins.
    """
    chosen = {name: value for name, value in addresses_in(settings).items() if name not in os.environ}
    os.environ.update(chosen)
    return frozenset(chosen)


def _is_alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
