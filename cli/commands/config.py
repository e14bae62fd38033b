"""`shardq config`: what holds, and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cli import config_file
from cli.config_file import ConfigFile
from cli.manner import manner
from cli.options import json_option
from cli.output import NOTHING, note, print_json, print_table

#: whose settings can be asked for; a test compares it with `cli.catalogue.PROCESSES`
COMMANDS = ("head", "tail", "bookkeeper", "flower")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a variable's value can come from."""

    environment: Mapping[str, str]
    #: variables that a running `shardq up` or the data directory gave
    found: frozenset[str]
    config: ConfigFile | None
    #: variables that options of `shardq` gave
    options: frozenset[str]

    def of(self, variable: str, command: str | None) -> tuple[str, str] | None:
        """The text and its source, or None for the default."""
        text = self.environment.get(variable)
        if text and variable in self.options:
            return text, "option"
        if text and variable not in self.found | config_file.from_file(self.environment):
            return text, "environment"
        if self.config and (table := self.config.tables.get(command or "", {})).get(variable):
            return table[variable], f"file [{command}]"
        if self.config and variable in self.config.top:
            return self.config.top[variable], "file"
        return (text, "data directory") if text else None


@click.command("config")
@click.argument("command", required=False, type=click.Choice(COMMANDS), metavar="[COMMAND]")
@json_option
@click.pass_context
def config_command(ctx: click.Context, command: str | None, as_json: bool) -> None:
    """The settings, and where each comes from.

    An option wins over an environment variable, that over the configuration file, that over the default. With COMMAND
    (head, tail, bookkeeper, flower) those of that command, the file's table for it included. No password is shown.

    \b
    shardq config
    shardq config head
    shardq config tail --json
    """
    path = config_file.find()
    options = {"SHARDQ_DATA_DIR"} if ctx.find_root().params["data_dir"] else set()
    sources = Sources(
        environment=dict(os.environ),
        found=manner().placed,
        config=config_file.read(path) if path else None,
        options=frozenset(options),
    )
    rows = list(_rows(sources, command))
    if as_json:
        settings = {key: {"value": value, "from": source} for key, source, value in rows}
        print_json({"file": path and str(path), "command": command, "settings": settings})
        return
    note(f"file: {path or f'none (it would be {_short(config_file.default_path())})'}")
    print_table(("SETTING", "FROM", "VALUE"), ((key, source, _cell(value)) for key, source, value in rows))


def _rows(sources: Sources, command: str | None) -> Iterable[tuple[str, str, Any]]:
    from pydantic_core import PydanticUndefined

    from cli.catalogue import all_settings, settings_of
    from tasks.logs import redact, secrets_of

    secrets = secrets_of(sources.environment)
    for key, setting in sorted((settings_of(command) if command else all_settings()).items()):
        given = sources.of(setting.variable, command)
        value, source = (setting.value_of(given[0]), given[1]) if given else (setting.default, "default")
        if value is PydanticUndefined:
            value = None
        yield key, source, value if isinstance(value, int | float | None) else redact(str(value), secrets)


def _cell(value: object) -> object:
    """A value as the file would say it."""
    if value is None:
        return NOTHING
    return str(value).lower() if isinstance(value, bool) else value


def _short(path: Path) -> str:
    home = str(Path.home())
    return f"~{str(path).removeprefix(home)}" if str(path).startswith(f"{home}/") else str(path)
