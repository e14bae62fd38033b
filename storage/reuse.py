"""Reuse: a job whose text has been generated before takes the result over instead of running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, literal, select

from storage.batch_records import Submission
from storage.batches import check_ours
from storage.database import Database
from storage.served_models import profile_keys
from storage.states import JobState
from storage.tables import IS_REUSABLE, IS_WAITING, job

#: what a job takes over; figures of the generation stay with the job that ran
_COPIED = (
    *("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "profile_key"),
    *("choices", "logprobs"),
)
#: jobs looked up at a time
_PAGE = 1000


def reuse_results(db: Database, submission: Submission) -> int:
    """Complete those jobs of a validating batch whose result is stored already; how many. Before publication.

    A stored result fits if its job was completed with the same request key by heads of the profile that the served
    name has now, and was generated, not taken over itself. Raises SubmissionSuperseded.
    """
    batch_id = submission.batch.id
    now = db.now()
    with db.write() as connection:
        check_ours(connection, submission)
        models = select(job.c.model).where(job.c.batch_id == batch_id).distinct()
        keys = profile_keys(connection, connection.execute(models).scalars().all())
        pages = (page for model, key in keys.items() for page in _matches(connection, batch_id, model, key))
        return sum(_take_over(connection, page, now) for page in pages)


def _matches(connection: Connection, batch_id: str, model: str, key: str) -> Iterator[list[dict[str, Any]]]:
    """Pages of the batch's waiting jobs, each with the oldest stored result that fits it, if there is one."""
    stored = job.alias("stored")
    # The unqualified names of IS_REUSABLE are those of the innermost table.
    source = (
        select(stored.c.id)
        .where(stored.c.request_key == job.c.request_key, IS_REUSABLE)
        .where(stored.c.profile_key == key, stored.c.model == model)
        .order_by(stored.c.recorded_at, stored.c.id)
        .limit(1)
        .correlate(job)
        .scalar_subquery()
    )
    query = (
        select(job.c.line, job.c.id, source.label("source"))
        .where(job.c.batch_id == batch_id, job.c.model == model, IS_WAITING)
        .order_by(job.c.line)
        .limit(_PAGE)
    )
    line = 0
    while rows := connection.execute(query.where(job.c.line > line)).all():
        yield [{"job_id": row.id, "source_id": row.source} for row in rows if row.source is not None]
        line = rows[-1].line


def _take_over(connection: Connection, matches: Sequence[dict[str, Any]], now: float) -> int:
    if not matches:
        return 0
    stored = job.alias("stored")
    pair = (job.c.id == bindparam("job_id"), stored.c.id == bindparam("source_id"))
    update = job.update().where(*pair, stored.c.request_key == job.c.request_key)
    values: dict[str, ColumnElement[Any]] = {name: stored.c[name] for name in _COPIED}
    values |= {"state": literal(JobState.COMPLETED), "recorded_at": literal(now), "reused_from": stored.c.id}
    connection.execute(update.values(values), list(matches))
    return len(matches)
