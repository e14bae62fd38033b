"""Which jobs are wanted: filters as people write them, and as the database's conditions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from operator import ge, gt, le, lt
from typing import Any

from sqlalchemy import ColumnElement

from storage.columns import JOB_COLUMNS, Kind
from storage.errors import FilterInvalid
from storage.states import TERMINAL_STATES, JobState
from storage.tables import job

_CONDITION = re.compile(r"\s*(\w+)\s*(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_ORDERED: dict[str, Callable[[Any, Any], Any]] = {"<": lt, "<=": le, ">": gt, ">=": ge}
#: the largest integer that both databases hold
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a column with a value; None stands for no value."""

    column: str
    operator: str
    value: str | int | float | None

    @classmethod
    def parse(cls, text: str) -> Condition:
        """`COLUMN=VALUE`, or with `!=`, `<`, `<=`, `>`, `>=`; without a value: has none. Raises FilterInvalid."""
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise FilterInvalid(f"{text!r}: expected COLUMN=VALUE, or with !=, <, <=, > or >= in place of =")
        column, operator, value = found[1], found[2], found[3].strip()
        check_columns([column])
        if not value and operator in _ORDERED:
            raise FilterInvalid(f"{text!r}: {operator} needs a value")
        return cls(column, operator, _value(column, value) if value else None)

    def clause(self) -> ColumnElement[bool]:
        """For a WHERE. A job without the value differs from every value, and is neither less nor more."""
        column = job.c[self.column]
        if self.operator in _ORDERED:
            return _ORDERED[self.operator](column, self.value)  # type: ignore[no-any-return]
        if self.operator == "=":
            return column.is_not_distinct_from(self.value)
        return column.is_distinct_from(self.value)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Jobs that have ended and meet all of this."""

    states: frozenset[JobState] = TERMINAL_STATES
    model: str | None = None
    #: recorded at this Unix time or later
    since: float | None = None
    conditions: tuple[Condition, ...] = ()

    def clauses(self) -> list[ColumnElement[bool]]:
        """For a WHERE."""
        wanted: list[ColumnElement[bool]] = [job.c.state.in_(sorted(self.states))]
        if self.model is not None:
            wanted.append(job.c.model == self.model)
        if self.since is not None:
            wanted.append(job.c.recorded_at >= self.since)
        return [*wanted, *(condition.clause() for condition in self.conditions)]


def check_columns(names: list[str]) -> None:
    """Raises FilterInvalid, which lists the columns, unless each is one of them."""
    unknown = [name for name in names if name not in JOB_COLUMNS]
    if unknown:
        raise FilterInvalid(f"no column {unknown[0]!r}; there are: {', '.join(JOB_COLUMNS)}")


def moment_of(text: str) -> float:
    """Unix seconds of a number, a date or a date with time (local unless it says its zone). Raises ValueError."""
    try:
        number = float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _value(column: str, text: str) -> str | int | float:
    kind = JOB_COLUMNS[column]
    if column == "state" and text not in TERMINAL_STATES:
        raise FilterInvalid(f"state {text!r}: results are of jobs that are {', '.join(sorted(TERMINAL_STATES))}")
    try:
        return _READ[kind](text)
    except (ValueError, OverflowError) as error:
        raise FilterInvalid(f"{column} {text!r}: expected {_EXPECTED[kind]}") from error


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) > _MAX_INTEGER:
        raise ValueError(text)
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_READ: dict[Kind, Callable[[str], str | int | float]] = {
    Kind.TEXT: str,
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
    Kind.TIME: moment_of,
}
_EXPECTED = {
    Kind.INTEGER: "a whole number",
    Kind.NUMBER: "a number",
    Kind.TIME: "Unix seconds, or a date such as 2026-11-30 or 2026-11-30T12:00",
}
