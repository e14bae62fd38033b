"""Every setting of every process: its key in a file, its variable, its type, its default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AliasChoices, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from cli.settings import CliSettings
from relay.settings import RelaySettings
from storage.settings import StorageSettings
from tasks.settings import BookkeeperSettings, LogSettings, TaskSettings
from workers.settings import CacheSettings, HeadSettings, TailSettings

#: what every variable of ours begins with
PREFIX = "SHARDQ_"

#: command that stays running → the settings its process reads
PROCESSES: dict[str, tuple[type[BaseSettings], ...]] = {
    "head": (HeadSettings, TaskSettings, RelaySettings, CacheSettings, LogSettings, CliSettings),
    "tail": (TailSettings, RelaySettings, CacheSettings, LogSettings, CliSettings),
    "bookkeeper": (BookkeeperSettings, StorageSettings, LogSettings, CliSettings),
    "flower": (TaskSettings, LogSettings, CliSettings),
}

#: fields that a head sets for its children
_HANDED_DOWN = {(TaskSettings, "head_id"), (BookkeeperSettings, "head_id")}
#: how JSON's types are called here
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", NoneType: ""}
#: limits as pydantic keeps them
_LIMITS = {Ge: "from {}", Gt: "above {}", Le: "up to {}", Lt: "below {}"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of one process."""

    key: str
    #: the type, with its limits
    kind: Any
    default: Any
    #: the class that declares it; None: an option that no settings class has
    owner: type[BaseSettings] | None
    #: the declaration
    declared: FieldInfo | click.Option

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{PREFIX}{self.key.upper()}"

    def as_text(self, value: object) -> str:
        """A value of a TOML file as the variable would say it. Raises ValueError with what was expected."""
        try:
            # JSON: there a path, or a word of an enumeration, is a string, and a number is no string
            TypeAdapter(self.kind).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            raise ValueError(f"expected {words(self.kind)}, not {value!r}") from error
        return str(value).lower() if isinstance(value, bool) else str(value)

    def value_of(self, text: str) -> Any:
        """The variable's text as the setting's type; the text itself if it is none."""
        try:
            return TypeAdapter(self.kind).validate_python(text)
        except ValidationError:
            return text


def words(kind: Any) -> str:
    """What values a type takes, for people."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([words(arguments[0]), *_limits(kind)])
    if origin in (Union, UnionType):
        return " or ".join(filter(None, map(words, arguments)))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f'"{member.value}"' for member in kind)
    return _WORDS.get(kind, "a text")


def settings_of(process: str) -> dict[str, Setting]:
    """The settings that a process reads, by key."""
    found: dict[str, Setting] = {}
    for owner in PROCESSES[process]:
        for name, declared in owner.model_fields.items():
            key = _key(owner, name, declared)
            if key is not None and key not in found and (owner, name) not in _HANDED_DOWN:
                kind = _with_limits(declared)
                found[key] = Setting(key, kind, declared.get_default(call_default_factory=True), owner, declared)
    for setting in _options(process):
        found.setdefault(setting.key, setting)
    return found


def all_settings() -> dict[str, Setting]:
    """Every setting by key: what may stand outside of a table."""
    return {key: setting for process in reversed(PROCESSES) for key, setting in settings_of(process).items()}


def _key(owner: type[BaseSettings], name: str, declared: FieldInfo) -> str | None:
    """The variable without our prefix, in lower case; None for a variable that is not ours."""
    variable = f"{owner.model_config.get('env_prefix', '')}{name}".upper()
    if isinstance(declared.validation_alias, str):
        variable = declared.validation_alias
    elif isinstance(declared.validation_alias, AliasChoices):
        variable = str(declared.validation_alias.choices[0])
    return variable.removeprefix(PREFIX).lower() if variable.startswith(PREFIX) else None


def _with_limits(declared: FieldInfo) -> Any:
    kind: Any = declared.annotation
    for limit in declared.metadata:
        kind = Annotated[kind, limit]
    return kind


def _limits(kind: Any) -> Iterator[str]:
    for limit in kind.__metadata__:
        for part in limit.metadata if isinstance(limit, FieldInfo) else [limit]:
            for carrier, text in _LIMITS.items():
                if isinstance(part, carrier):
                    yield text.format(getattr(part, carrier.__name__.lower()))


def _options(process: str) -> Iterator[Setting]:
    """Options with a variable of ours: those that no settings class declares, too."""
    from cli.main import shardq

    context = click.Context(shardq)
    command = shardq.get_command(context, process)
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option) and isinstance(option.envvar, str):
            key = option.envvar.removeprefix(PREFIX).lower()
            default = False if option.is_flag else option.get_default(context)
            yield Setting(key, _kind(option), default, None, option)


def _kind(option: click.Option) -> Any:
    if option.is_flag:
        return bool
    if isinstance(option.type, click.Choice):
        return Literal[tuple(option.type.choices)]
    numbers = {"integer": int, "integer range": int, "float": float, "float range": float}
    return numbers.get(option.type.name, str)
