"""Batches: submitted in steps that only the last one makes visible, listed and found again."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select
from sqlalchemy.exc import IntegrityError

from storage.batch_records import BatchRow, Counts, NewBatch, Submission
from storage.database import Database
from storage.endings import end_batches, move_batch
from storage.errors import (
    BatchAmbiguous,
    BatchEmpty,
    BatchNotFound,
    JobExists,
    NameTaken,
    SubmissionSuperseded,
)
from storage.job_records import NewJob
from storage.request_keys import request_key
from storage.states import TERMINAL_STATUSES, BatchStatus, JobState
from storage.tables import batch, job

#: random bytes in a batch id
_ID_BYTES = 8
#: ids named when a prefix fits several batches
_MAX_CANDIDATES = 5


def begin_submission(db: Database, new: NewBatch) -> Submission:
    """Open a batch for its jobs, or find the one that already has this name and content.

    Same name, file and parameters: a published batch is returned as it is, one still validating (its
    submission was interrupted) is emptied and taken over, with the new parameters. Same name with another
    file, with other parameters once published, or of a batch that failed, expired or was cancelled:
    NameTaken.
    """
    token = secrets.token_hex(_ID_BYTES)
    with db.write() as connection:
        found = _find_by_name(connection, new.name)
        if found is None:
            batch_id = _insert_batch(connection, new, token, db.now())
            return Submission(_load(connection, batch_id), token, published=False, resumed=False)
        if difference := _difference(found, new):
            is_whole = found["in_progress_at"] is not None
            raise NameTaken(str(new.name), found["id"], difference, can_be_retried=is_whole)
        if found["status"] != BatchStatus.VALIDATING:
            return Submission(_load(connection, found["id"]), token, published=True, resumed=False)
        connection.execute(job.delete().where(job.c.batch_id == found["id"]))
        connection.execute(batch.update().where(batch.c.id == found["id"]).values(submission=token, **_chosen(new)))
        return Submission(_load(connection, found["id"]), token, published=False, resumed=True)


def add_jobs(db: Database, submission: Submission, jobs: Sequence[NewJob]) -> None:
    """Write a chunk of a validating batch's jobs in one transaction; about 1,000 at a time are best.

    Raises SubmissionSuperseded, and JobExists if a line or custom_id is already there (nothing is written).
    """
    batch_id = submission.batch.id
    if not jobs:
        return
    with db.write() as connection:
        check_ours(connection, submission)
        try:
            connection.execute(job.insert(), [_job_values(batch_id, new) for new in jobs])
        except IntegrityError as error:
            raise JobExists(batch_id) from error


def publish_batch(db: Database, submission: Submission, *, num_invalid_lines: int = 0) -> BatchRow:
    """The last step of a submission: from here on the feeder sees the batch's jobs.

    A batch whose jobs all have a reused result ends with it. Raises SubmissionSuperseded, or BatchEmpty if no job was
    added.
    """
    batch_id = submission.batch.id
    now = db.now()
    with db.write() as connection:
        check_ours(connection, submission)
        if connection.execute(select(job.c.id).where(job.c.batch_id == batch_id).limit(1)).first() is None:
            raise BatchEmpty(batch_id)
        connection.execute(batch.update().where(batch.c.id == batch_id).values(num_invalid_lines=num_invalid_lines))
        move_batch(connection, batch_id, BatchStatus.IN_PROGRESS, now)
        end_batches(connection, [batch_id], now)
        return _load(connection, batch_id)


def discard_batch(db: Database, submission: Submission) -> None:
    """Forget a validating batch and its jobs, as after a refused file. Raises SubmissionSuperseded."""
    with db.write() as connection:
        check_ours(connection, submission)
        connection.execute(job.delete().where(job.c.batch_id == submission.batch.id))
        connection.execute(batch.delete().where(batch.c.id == submission.batch.id))


def get_batch(db: Database, reference: str) -> BatchRow:
    """The batch with this id, this name, or the only one whose id begins so (with or without `batch_`).

    Raises BatchNotFound or BatchAmbiguous.
    """
    with db.read() as connection:
        return _load(connection, _resolve(connection, reference))


def batch_of_file(db: Database, file_hash: str, *, other_than: str) -> BatchRow | None:
    """The latest published batch of this content but one; None if there is no other."""
    query = select(batch.c.id).where(
        batch.c.file_hash == file_hash, batch.c.id != other_than, batch.c.in_progress_at.is_not(None)
    )
    with db.read() as connection:
        found = connection.execute(query.order_by(batch.c.created_at.desc()).limit(1)).scalar_one_or_none()
        return None if found is None else _load(connection, found)


def list_batches(db: Database, *, limit: int = 50, statuses: Iterable[BatchStatus] = ()) -> list[BatchRow]:
    """The newest batches, newest first; only those with one of `statuses` if any are given."""
    wanted = list(statuses)
    query = select(batch).order_by(batch.c.created_at.desc(), batch.c.id).limit(limit)
    if wanted:
        query = query.where(batch.c.status.in_(wanted))
    with db.read() as connection:
        rows = connection.execute(query).mappings().all()
        counts = count_jobs(connection, [row["id"] for row in rows])
        return [_batch_row(row, counts[row["id"]]) for row in rows]


def count_jobs(connection: Connection, batch_ids: Sequence[str]) -> dict[str, Counts]:
    """Jobs by state for each of `batch_ids`, zeros included."""
    query = (
        select(job.c.batch_id, job.c.state, func.count())
        .where(job.c.batch_id.in_(batch_ids))
        .group_by(job.c.batch_id, job.c.state)
    )
    numbers: dict[str, dict[str, int]] = {batch_id: {} for batch_id in batch_ids}
    for batch_id, state, number in connection.execute(query):
        numbers[batch_id][state] = number
    return {batch_id: Counts(**by_state) for batch_id, by_state in numbers.items()}


def check_ours(connection: Connection, submission: Submission) -> None:
    """Lock the batch's row and check that the submission may write to it. Raises SubmissionSuperseded."""
    query = select(batch.c.submission, batch.c.status).where(batch.c.id == submission.batch.id)
    row = connection.execute(query.with_for_update()).one_or_none()
    if row is None or (row.submission, row.status) != (submission.token, BatchStatus.VALIDATING):
        raise SubmissionSuperseded(submission.batch.id)


def _find_by_name(connection: Connection, name: str | None) -> RowMapping | None:
    if name is None:
        return None
    query = select(batch).where(batch.c.name == name).with_for_update()
    return connection.execute(query).mappings().one_or_none()


def _difference(found: RowMapping, new: NewBatch) -> str | None:
    """What forbids `new` to be the batch found under its name; None if nothing does."""
    if found["file_hash"] != new.file_hash:
        return "another content"
    if found["status"] == BatchStatus.VALIDATING:
        return None
    if found["status"] in TERMINAL_STATUSES - {BatchStatus.COMPLETED}:
        return f"the status {found['status']}"
    theirs, ours = json.loads(found["parameters"]), json.loads(json.dumps(new.parameters or {}))
    names = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    return f"other parameters ({', '.join(names)})" if names else None


def _insert_batch(connection: Connection, new: NewBatch, token: str, now: float) -> str:
    batch_id = f"batch_{secrets.token_hex(_ID_BYTES)}"
    values = {
        "id": batch_id,
        "name": new.name,
        "file_hash": new.file_hash,
        "status": BatchStatus.VALIDATING,
        "num_invalid_lines": 0,
        "submission": token,
        "created_at": now,
        **_chosen(new),
    }
    try:
        connection.execute(batch.insert().values(values))
    except IntegrityError as error:
        # PostgreSQL only: a submission of the same name came in between.
        raise NameTaken(str(new.name), "a batch", "just been submitted; try again") from error
    return batch_id


def _chosen(new: NewBatch) -> dict[str, Any]:
    """What a later submission of the same file may choose anew until the batch is published."""
    return {
        "endpoint": new.endpoint,
        "parameters": json.dumps(new.parameters or {}),
        "metadata": json.dumps(new.metadata) if new.metadata else None,
        "priority": new.priority,
        "expires_at": new.expires_at,
    }


def _job_values(batch_id: str, new: NewJob) -> dict[str, Any]:
    return {
        "id": f"{batch_id}-{new.line}",
        "batch_id": batch_id,
        "line": new.line,
        "custom_id": new.custom_id,
        "model": new.model,
        "url": new.url,
        "state": JobState.WAITING,
        "attempt": 1,
        "deliveries": 0,
        "request": new.request,
        "request_bytes": len(new.request.encode()),
        "request_key": request_key(new.model, new.request),
        "metadata": new.metadata,
        "expires_at": new.expires_at,
        "duplicate_records": 0,
        "stale_records": 0,
    }


def _resolve(connection: Connection, reference: str) -> str:
    exact = select(batch.c.id).where((batch.c.id == reference) | (batch.c.name == reference))
    # An id wins over a name that looks like one.
    ids = sorted(connection.execute(exact).scalars(), key=lambda found: found != reference)
    if ids:
        return str(ids[0])
    if not reference:
        raise BatchNotFound(reference)
    begins = batch.c.id.startswith(reference, autoescape=True) | batch.c.id.startswith(
        f"batch_{reference}", autoescape=True
    )
    query = select(batch.c.id).where(begins).order_by(batch.c.created_at.desc()).limit(_MAX_CANDIDATES)
    candidates = connection.execute(query).scalars().all()
    if not candidates:
        raise BatchNotFound(reference)
    if len(candidates) > 1:
        raise BatchAmbiguous(reference, candidates)
    return str(candidates[0])


def _load(connection: Connection, batch_id: str) -> BatchRow:
    row = connection.execute(select(batch).where(batch.c.id == batch_id)).mappings().one()
    return _batch_row(row, count_jobs(connection, [batch_id])[batch_id])


def _batch_row(row: RowMapping, counts: Counts) -> BatchRow:
    values = {name: row[name] for name in BatchRow.__slots__ if name != "counts"}
    values["status"] = BatchStatus(row["status"])
    values["parameters"] = json.loads(row["parameters"])
    values["metadata"] = json.loads(row["metadata"] or "null")
    return BatchRow(**values, counts=counts)
