"""What a user of the client asked for, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cli.client.transport import Order
from cli.errors import InputRefused
from storage.batch_records import PRIORITIES
from storage.states import RETRYABLE_STATES, BatchStatus, JobState
from tasks.durations import DurationInvalid, seconds
from tasks.errors import ParameterInvalid
from tasks.openai_batch import Defaults
from tasks.parameter_rules import is_text

#: characters of a note's key and text, and notes about a batch
MAX_KEY, MAX_NOTE, MAX_NOTES = 64, 512, 16


def order_of(
    *,
    name: str | None,
    expect_model: str | Collection[str],
    priority: int | None,
    expires_in: str | float | None,
    metadata: Mapping[str, str] | None,
    reuse: bool,
    on_invalid: str,
    **defaults: Any,
) -> Order:
    """Raises InputRefused, which names the keyword. `defaults`: those of `Defaults.of`."""
    if on_invalid not in ("reject", "skip"):
        raise InputRefused(f'on_invalid: expected "reject" or "skip", got {on_invalid!r}')
    if priority is not None and priority not in PRIORITIES:
        raise InputRefused(f"priority: expected {PRIORITIES[0]} to {PRIORITIES[-1]}, got {priority!r}")
    _check_kind("map_model", defaults.get("map_model") or {}, Mapping, "served names by name")
    _check_kind("expect_model", expect_model, Collection, "a name or names")
    try:
        checked = Defaults.of(**defaults)
    except ParameterInvalid as error:
        raise InputRefused(f"{error.field or 'model'}: {error.message}") from error
    return Order(
        name,
        checked,
        on_invalid == "skip",
        priority=priority,
        expires_in_s=duration_of(expires_in),
        reuse=reuse,
        expected=frozenset([expect_model] if isinstance(expect_model, str) else expect_model),
        metadata=notes_of(metadata),
    )


def notes_of(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Notes about a batch, within OpenAI's limits: typed clients check them. Raises InputRefused."""
    _check_kind("metadata", metadata or {}, Mapping, "notes by key")
    notes = dict(metadata or {})
    for key, note in notes.items():
        if not (is_text(key) and is_text(note) and 0 < len(key) <= MAX_KEY and len(note) <= MAX_NOTE):
            limits = f"a key of 1 to {MAX_KEY} characters and a text of at most {MAX_NOTE}"
            raise InputRefused(f"metadata: expected {limits}, got {str(key)[:60]!r}: {str(note)[:60]!r}")
    if len(notes) > MAX_NOTES:
        raise InputRefused(f"metadata: expected at most {MAX_NOTES} notes, got {len(notes)}")
    return notes or None


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
    _check_names("states", names, RETRYABLE_STATES)
    return frozenset(map(JobState, names))


def statuses_of(names: Collection[str]) -> list[BatchStatus]:
    """The statuses of batches. Raises InputRefused."""
    _check_names("statuses", names, BatchStatus)
    return list(map(BatchStatus, names))


def check_limit(limit: int) -> None:
    """Raises InputRefused for less than one."""
    if limit < 1:
        raise InputRefused(f"limit: expected a number from 1, got {limit!r}")


def _check_kind(keyword: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise InputRefused(f"{keyword}: expected {expected}, got {value!r}")


def _check_names(keyword: str, names: Collection[str], known: Iterable[str]) -> None:
    expected = sorted(known)
    for name in [names] if isinstance(names, str) else names:
        if isinstance(names, str) or name not in expected:
            raise InputRefused(f"{keyword}: expected a list of {', '.join(expected)}, got {name!r}")
