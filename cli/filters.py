"""Options that choose jobs: which, since when, and which of their columns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

from cli.client.results import RESULT_COLUMNS
from storage.errors import FilterInvalid
from storage.filters import Condition, check_columns, moment_of
from tasks.durations import FORMS, DurationInvalid, seconds

F = TypeVar("F", bound=Callable[..., Any])


def filter_options(function: F) -> F:
    """`--failed`, `--model`, `--since` and `--where`."""
    options = (
        click.option("--failed", is_flag=True, help="Only jobs that failed, were cancelled or expired."),
        click.option("--model", help="Only jobs of this served name."),
        click.option(
            "--since",
            metavar="WHEN",
            callback=_read_since,
            help="Only jobs that ended this long ago or later (2h, 7d), or from a date on (2026-11-30T12:00).",
        ),
        click.option(
            "--where",
            "conditions",
            metavar="CONDITION",
            multiple=True,
            callback=_read_conditions,
            help="Only jobs for which COLUMN=VALUE holds, or !=, <, <=, >, >=; may be given several times.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def read_columns(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names with commas between them, each once; none if the option was not given. Raises BadParameter."""
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    if value is not None and not names:
        raise click.BadParameter(f"{value!r} names no column: expected names with commas between them, as id,text.")
    try:
        check_columns([name for name in names if name not in RESULT_COLUMNS])
    except FilterInvalid as error:
        raise click.BadParameter(f"{error}, {', '.join(RESULT_COLUMNS)}.") from error
    return tuple(dict.fromkeys(names))


def _read_conditions(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[Condition, ...]:
    try:
        return tuple(Condition.parse(value) for value in values)
    except FilterInvalid as error:
        raise click.BadParameter(f"{error}.") from error


def _read_since(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    with suppress(DurationInvalid):
        return time.time() - seconds(value)
    try:
        return moment_of(value)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"{value!r}: expected {FORMS}, or a date such as 2026-11-30T12:00.") from error
