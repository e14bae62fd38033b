"""What a user of the client asked for, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cli.client.transport import Order
from cli.errors import InputRefused
from storage.batch_records import PRIORITIES
from storage.states import RETRYABLE_STATES, JobState
from tasks.durations import DurationInvalid, seconds
from tasks.errors import ParameterInvalid
from tasks.openai_batch import Defaults


def order_of(
    name: str | None,
    model: str | None,
    priority: int | None,
    expires_in: str | float | None,
    reuse: bool,
    on_invalid: str,
    parameters: Mapping[str, Any],
) -> Order:
    """Raises InputRefused, which names the keyword."""
    if on_invalid not in ("reject", "skip"):
        raise InputRefused(f'on_invalid: expected "reject" or "skip", got {on_invalid!r}')
    if priority is not None and priority not in PRIORITIES:
        raise InputRefused(f"priority: expected {PRIORITIES[0]} to {PRIORITIES[-1]}, got {priority!r}")
    try:
        defaults = Defaults.of(model=model, **parameters)
    except ParameterInvalid as error:
        raise InputRefused(f"{error.field or 'model'}: {error.message}") from error
    return Order(
        name, defaults, on_invalid == "skip", priority=priority, expires_in_s=duration_of(expires_in), reuse=reuse
    )


def duration_of(expires_in: str | float | None) -> float | None:
    """Seconds of what may be `"2h"`. Raises InputRefused."""
    if expires_in is None:
        return None
    try:
        return seconds(expires_in)
    except DurationInvalid as error:
        raise InputRefused(f"expires_in: expected {error}, got {expires_in!r}") from error


def states_of(names: Collection[str]) -> frozenset[JobState]:
    """The states of jobs that can run again. Raises InputRefused."""
    for name in names:
        if name not in RETRYABLE_STATES:
            raise InputRefused(f"states: expected {', '.join(sorted(RETRYABLE_STATES))}, got {name!r}")
    return frozenset(map(JobState, names))
