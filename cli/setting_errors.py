"""What is wrong with settings, each with its option and variable."""

from __future__ import annotations

from typing import Any

import click
from pydantic import ValidationError

from cli.catalogue import PREFIX, PROCESSES, Setting, settings_of, words


def described(error: ValidationError) -> str:
    """One line about bad settings."""
    first: dict[str, Any] = {}
    for problem in error.errors(include_url=False):
        # a choice of types has a problem for each of them
        first.setdefault(str(problem["loc"][0]), problem)
    return "; ".join(_line(error.title, field, problem) for field, problem in first.items())


def _line(owner: str, field: str, problem: Any) -> str:
    process, setting = _declared(owner, field)
    variable = setting.variable if setting else f"{PREFIX}{field.upper()}"
    option = _option(process, variable) if process else None
    name = f"{option} ({variable})" if option else variable
    if problem["type"] == "missing":
        return f"{name} is not set"
    if problem["type"] == "value_error":
        # Our own validators say it all; the input may hold a password.
        return str(problem["ctx"]["error"])
    if field.endswith("url"):
        return f"{name}: {problem['msg'].lower()}"
    expected = words(setting.kind) if setting else ""
    if expected in ("", "a text"):
        return f"{name}: {problem['msg'].lower()}, not {problem['input']!r}"
    return f"{name}: expected {expected}, not {problem['input']!r}"


def _declared(owner: str, field: str) -> tuple[str | None, Setting | None]:
    """A process that reads the field of the settings class of this name, and the setting that the field is."""
    for process, owners in PROCESSES.items():
        for setting in settings_of(process).values() if owner in {each.__name__ for each in owners} else ():
            if setting.owner is not None and setting.declared is setting.owner.model_fields.get(field):
                return process, setting
    return None, None


def _option(process: str, variable: str) -> str | None:
    """The option of the process' command for this variable."""
    from cli.main import shardq

    command = shardq.get_command(click.Context(shardq), process)
    options = [option for option in command.params if isinstance(option, click.Option)] if command else []
    key = variable.removeprefix(PREFIX).lower()
    return next((option.opts[0] for option in options if variable == option.envvar or key == option.name), None)
