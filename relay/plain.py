"""Dataclasses from plain JSON or msgpack values that somebody else wrote: every field is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

#: what a field's value becomes; raises ValueError
_Reader = Callable[[object], Any]


def from_plain(cls: type[T], value: object, growing: frozenset[type] = frozenset()) -> T:
    """The frozen dataclass `cls` whose fields these are; lists become tuples. Raises ValueError naming the field.

    Knows fields of the types that JSON has, enums of texts, tuples of one type, dataclasses, and unions of these.
    Fields with a default may be missing; unknown ones are refused, but left out for the classes in `growing`: a later
    version may tell more of these, and what is known of them holds without it.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{cls.__name__}: expected an object, got {type(value).__name__}")
    kind: Any = cls
    readers = _readers(kind, growing)
    if (unknown := value.keys() - readers.keys()) and cls not in growing:
        raise ValueError(f"{cls.__name__}: unknown field {min(map(str, unknown))[:40]!r}")
    if missing := _required(kind) - value.keys():
        raise ValueError(f"{cls.__name__}: no field {min(missing)!r}")
    read: dict[str, Any] = {}
    for name, item in value.items():
        if name in unknown:
            continue
        try:
            read[name] = readers[name](item)
        except ValueError as error:
            raise ValueError(f"{cls.__name__}.{name}: {error}") from error
    return cls(**read)


@cache
def _required(cls: Any) -> frozenset[str]:
    found = [f for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    return frozenset(f.name for f in found)


@cache
def _readers(cls: Any, growing: frozenset[type]) -> dict[str, _Reader]:
    hints = get_type_hints(cls)
    return {f.name: _reader(hints[f.name], growing) for f in fields(cls)}


def _reader(hint: Any, growing: frozenset[type]) -> _Reader:
    origin = get_origin(hint)
    if hint is Any:
        return lambda value: value
    if origin in (Union, UnionType):
        return _one_of(get_args(hint), growing)
    if origin is tuple:
        return _many(_reader(get_args(hint)[0], growing))
    if is_dataclass(hint):
        kind = cast("type[Any]", hint)
        return lambda value: from_plain(kind, value, growing)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _member(hint)
    return _exactly(origin or hint)


def _exactly(kind: type) -> _Reader:
    kinds = (int, float) if kind is float else (kind,)

    def read(value: object) -> object:
        if type(value) not in kinds:
            raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read


def _many(item: _Reader) -> _Reader:
    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list, got {type(value).__name__}")
        return tuple([item(part) for part in value])

    return read


def _member(kind: type[StrEnum]) -> _Reader:
    members = {str(member): member for member in kind}

    def read(value: object) -> StrEnum:
        if not isinstance(value, str) or value not in members:
            raise ValueError(f"expected one of {', '.join(kind)}, got {str(value)[:40]!r}")
        return members[value]

    return read


def _one_of(hints: tuple[Any, ...], growing: frozenset[type]) -> _Reader:
    arms = [_reader(hint, growing) for hint in hints if hint is not NoneType]

    def read(value: object) -> Any:
        if value is None and NoneType in hints:
            return None
        for arm in arms[:-1]:
            try:
                return arm(value)
            except ValueError:
                continue
        return arms[-1](value)

    return read
