"""Types of options whose value is a duration or a moment: `90s`, `10m`, `2h`, `7d`, `1h30m` or a number of seconds."""

from __future__ import annotations

import click

from tasks import moments
from tasks.durations import DurationInvalid, seconds


def time_ahead(value: str | float) -> float:
    """How long something may take from now on, in seconds; more than none."""
    return _seconds(value, may_be_zero=False)


def age(value: str | float) -> float:
    """How long ago something was, in seconds."""
    return _seconds(value, may_be_zero=True)


def moment(value: str) -> str:
    """A moment to come, as `workers.settings` reads it."""
    try:
        moments.ahead(value, 0.0)
    except DurationInvalid as error:
        raise click.BadParameter(f"{value!r}: expected {error}.") from error
    return value


def _seconds(value: str | float, *, may_be_zero: bool) -> float:
    try:
        return seconds(value, may_be_zero=may_be_zero)
    except DurationInvalid as error:
        raise click.BadParameter(f"{value!r}: expected {error}.") from error
