"""The configuration file: settings in TOML, for those that neither an option nor a variable gives."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cli.errors import ConfigInvalid

#: names the file; `/dev/null` is none
FILE_VARIABLE = "SHARDQ_CONFIG"
#: what helps where a file is another user's, as behind `sudo`
_ELSE = f"make it readable for this user, or let {FILE_VARIABLE} name another (/dev/null: none)"
#: names the variables that came from a file, so that a child process reads the file for itself
ORIGIN_VARIABLE = "SHARDQ_FROM_FILE"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says, checked: texts by variable."""

    path: Path
    top: Mapping[str, str] = field(default_factory=dict)
    #: by the command that they are for
    tables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def variables(self, command: str | None) -> dict[str, str]:
        """What holds for a command: its table, and outside of it what that leaves open."""
        return {**self.top, **self.tables.get(command or "", {})}


def default_path() -> Path:
    """`$XDG_CONFIG_HOME/shardq/config.toml`, else `~/.config/shardq/config.toml`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "shardq" / "config.toml"


def find() -> Path | None:
    """The file to read: the one that `SHARDQ_CONFIG` names, else the default one if it is there.

    Raises ConfigInvalid if the place of the default one may not be looked into.
    """
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named).expanduser()
    path = default_path()
    try:
        return path if path.is_file() else None
    except OSError as error:
        raise ConfigInvalid(f"cannot look for {path}: {error.strerror}; {_ELSE}") from error


def read(path: Path) -> ConfigFile:
    """Read and check a file. Raises ConfigInvalid."""
    try:
        with path.open("rb") as stream:
            found = tomllib.load(stream)
            mode = os.fstat(stream.fileno()).st_mode
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}; {_ELSE}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is no TOML: {error}") from error
    if not found:
        return ConfigFile(path)
    config = _checked(path, found)
    if stat.S_IMODE(mode) & 0o077:
        _refuse_passwords(config)
    return config


def apply(config: ConfigFile, command: str | None) -> None:
    """Set this process' variables that are not set to what the file says for a command."""
    chosen = {name: text for name, text in config.variables(command).items() if not os.environ.get(name)}
    if chosen:
        os.environ.update({**chosen, ORIGIN_VARIABLE: " ".join(chosen)})


def from_file(environment: Mapping[str, str]) -> frozenset[str]:
    """The variables of an environment that `apply` set."""
    return frozenset(environment.get(ORIGIN_VARIABLE, "").split())


def _checked(path: Path, found: Mapping[str, Any]) -> ConfigFile:
    """Raises ConfigInvalid for a key that is none and a value of the wrong type."""
    from cli.catalogue import PROCESSES, all_settings, settings_of

    top: dict[str, str] = {}
    tables: dict[str, dict[str, str]] = {}
    known = all_settings()
    for key, value in found.items():
        if key in PROCESSES:
            table = _table(path, key, value)
            own = settings_of(key)
            tables[key] = dict(_texts(f"{path}: [{key}] ", table, own, f"[{key}]"))
        else:
            if isinstance(value, dict):
                raise ConfigInvalid(f"{path}: there is no table [{key}], only {_listed(PROCESSES)}")
            top |= dict(_texts(f"{path}: ", {key: value}, known, "shardq"))
    return ConfigFile(path, top, tables)


def _table(path: Path, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{path}: {name} is a table: write [{name}] and its settings below")
    return value


def _texts(where: str, values: Mapping[str, Any], known: Mapping[str, Any], reader: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "`shardq config` lists them"
            raise ConfigInvalid(f"{where}{key} is no setting of {reader}: {hint}")
        try:
            yield known[key].variable, known[key].as_text(value)
        except ValueError as error:
            raise ConfigInvalid(f"{where}{key}: {error}") from error


def _refuse_passwords(config: ConfigFile) -> None:
    from tasks.logs import secrets_of

    for name, variables in (("", config.top), *((f"[{table}] ", values) for table, values in config.tables.items())):
        for variable, text in variables.items():
            if secrets_of({variable: text}):
                key = variable.removeprefix("SHARDQ_").lower()
                raise ConfigInvalid(
                    f"{config.path}: {name}{key} holds a password that others may read: run `chmod 600 {config.path}`"
                )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"[{name}]" for name in names)
