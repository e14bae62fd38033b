"""Stored jobs by filter, of one batch or of all, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import exists, select

from storage.database import Database
from storage.errors import JobNotFound
from storage.filters import JobFilter
from storage.job_records import JobRow
from storage.job_rows import read_rows, with_large
from storage.states import BatchStatus
from storage.tables import batch, job


def find_jobs(
    db: Database, wanted: JobFilter, *, batch_id: str | None = None, logprobs: bool = False, requests: bool = False
) -> Iterator[JobRow]:
    """The ended jobs that meet the filter: batch after batch, oldest first, each in input order.

    Across batches, one that is still validating is left out: the results it took over are not published yet. Read page
    by page, each in a transaction of its own, as `iterate_results` does.
    """
    conditions = wanted.clauses()
    for one in [batch_id] if batch_id is not None else _batches_with(db, wanted):
        line = 0
        while page := read_rows(db, job.c.batch_id == one, job.c.line > line, *conditions):
            yield from with_large(db, page, logprobs=logprobs, requests=requests)
            line = page[-1].line


def request_of(db: Database, job_id: str) -> str:
    """JSON text of the job's request for the engine. Raises JobNotFound."""
    with db.read() as connection:
        found = connection.execute(select(job.c.request).where(job.c.id == job_id)).scalar_one_or_none()
    if found is None:
        raise JobNotFound(job_id)
    return str(found)


def _batches_with(db: Database, wanted: JobFilter) -> list[str]:
    has_wanted = exists().where(job.c.batch_id == batch.c.id, *wanted.clauses())
    query = select(batch.c.id).where(batch.c.status != BatchStatus.VALIDATING, has_wanted)
    with db.read() as connection:
        return list(connection.execute(query.order_by(batch.c.created_at, batch.c.id)).scalars())
