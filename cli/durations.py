"""Options whose value is a duration."""

from __future__ import annotations

from typing import Any

import click

from tasks.durations import DurationInvalid, seconds


class DurationType(click.ParamType):
    """`90s`, `10m`, `2h`, `7d`, `1h30m` or a number of seconds; gives seconds."""

    name = "duration"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return seconds(value, may_be_zero=self._may_be_zero)
        except DurationInvalid as error:
            self.fail(f"{value!r}: expected {error}.", param, ctx)


#: how long something may take from now on
DURATION = DurationType()
#: how long ago something was
AGE = DurationType(may_be_zero=True)
