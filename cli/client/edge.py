"""Errors of the packages below as the client's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from cli.errors import NotFound, Refused, SettingInvalid, ShardqError, Unavailable
from cli.next_steps import with_next_step
from storage.errors import (
    BatchNotFound,
    DatabaseUnavailable,
    DatabaseUrlInvalid,
    DriverMissing,
    JobNotFound,
    SchemaInvalid,
    StorageError,
)
from tasks.errors import OtherDatabase, TaskError

_NOT_FOUND = (BatchNotFound, JobNotFound)
_UNAVAILABLE = (TaskError, DatabaseUnavailable, SchemaInvalid, DriverMissing)


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raises a ShardqError for what storage, tasks and their settings raise; passwords stay out of it."""
    try:
        yield
    except (StorageError, TaskError) as error:
        kind = type(error)
        message = with_next_step(" ".join(str(error).split()), kind)
        from tasks.logs import redact, secrets_of

        raise _kind_of(kind)(redact(message, secrets_of(os.environ))) from error
    except ValidationError as error:
        from cli.setting_errors import described

        raise SettingInvalid(described(error)) from error


def _kind_of(kind: type[Exception]) -> type[ShardqError]:
    if issubclass(kind, _NOT_FOUND):
        return NotFound
    if issubclass(kind, OtherDatabase):
        return Refused
    if issubclass(kind, DatabaseUrlInvalid):
        return SettingInvalid
    return Unavailable if issubclass(kind, _UNAVAILABLE) else Refused
