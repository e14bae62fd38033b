"""Rows of jobs with their outcomes and figures, read a page at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Row, RowMapping, or_, select

from storage.database import Database
from storage.job_records import ChoiceRow, JobRow
from storage.states import JobState, StopReason
from storage.tables import job

#: rows read at a time; they come without their requests
PAGE = 200

#: columns that can be megabytes: read job by job, where there is anything in them
_LARGE = ("choices", "logprobs", "metadata", "request")
_FIELDS = [name for name in JobRow.__slots__ if name not in _LARGE]
_COLUMNS = [job.c[name] for name in _FIELDS]
_STATE, _STOP_REASON, _TOKEN_IDS, _ROUNDS = map(_FIELDS.index, ("state", "stop_reason", "token_ids", "rounds_by_draft"))


def read_rows(db: Database, *conditions: ColumnElement[bool], limit: int = PAGE) -> list[JobRow]:
    """Up to `limit` jobs for which these hold, in the order of their lines, without what can be megabytes."""
    query = select(*_COLUMNS).where(*conditions).order_by(job.c.line).limit(limit)
    with db.read() as connection:
        return [_job_row(row) for row in connection.execute(query)]


def with_large(
    db: Database, page: Sequence[JobRow], *, logprobs: bool = False, requests: bool = False
) -> Iterator[JobRow]:
    """The rows of one batch, in the order of their lines, with choices, metadata and what is asked for."""
    asked = [column for column, wanted in ((job.c.logprobs, logprobs), (job.c.request, requests)) if wanted]
    columns = [job.c.choices, job.c.metadata, *asked]
    having = select(job.c.line).where(
        job.c.batch_id == page[0].batch_id,
        job.c.line.between(page[0].line, page[-1].line),
        or_(*[column.is_not(None) for column in columns]),
    )
    with db.read() as connection:
        lines = frozenset(connection.execute(having).scalars())
    for row in page:
        yield _filled(db, row, columns) if row.line in lines else row


def _filled(db: Database, row: JobRow, columns: Sequence[ColumnElement[Any]]) -> JobRow:
    with db.read() as connection:
        values = connection.execute(select(*columns).where(job.c.id == row.id)).mappings().one_or_none()
    # none any more: the batch was deleted meanwhile
    return row if values is None else replace(row, **_large(values))


def _large(values: RowMapping) -> dict[str, Any]:
    choices = tuple(_choice_row(choice) for choice in json.loads(values["choices"] or "[]"))
    return {**values, "choices": choices, "metadata": json.loads(values["metadata"] or "null")}


def _choice_row(value: dict[str, Any]) -> ChoiceRow:
    return ChoiceRow(value["text"], tuple(value["token_ids"]), value["finish_reason"])


def _job_row(row: Row[Any]) -> JobRow:
    # By position: a look-up by name for each column would take twice as long for a large batch.
    values = list(row)
    values[_STATE] = JobState(values[_STATE])
    values[_STOP_REASON] = None if values[_STOP_REASON] is None else StopReason(values[_STOP_REASON])
    values[_TOKEN_IDS] = tuple(json.loads(values[_TOKEN_IDS] or "[]"))
    values[_ROUNDS] = tuple(tuple(counts) for counts in json.loads(values[_ROUNDS] or "[]"))
    return JobRow(*values)
