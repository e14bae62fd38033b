"""Stops: the database decides that jobs end before their text does; queue and engines follow.

A waiting job ends at once. One in flight keeps its state, with a reason beside it, until its engine has told its
outcome, or until the bookkeeper has made sure that nobody holds it (`settle_stops`).
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, bindparam, exists, func, or_, select

from storage.database import Database
from storage.endings import (
    end_batches,
    end_stopped,
    explanation,
    flag_in_flight,
    lock_batches,
    lock_batches_of,
    move_batch,
)
from storage.errors import BatchEnded, BatchNotFound, JobNotFound
from storage.job_records import PendingStop, Stopped
from storage.states import (
    FED_STATUSES,
    IN_FLIGHT_STATES,
    OPEN_STATES,
    STOP_ENDS,
    TERMINAL_STATUSES,
    BatchStatus,
    StopReason,
)
from storage.tables import IS_EXPIRING, IS_STOPPING, IS_WAITING, batch, job


def cancel_batch(db: Database, batch_id: str) -> Stopped:
    """Cancel what has not ended of the batch; a repetition changes nothing more.

    A batch with jobs in flight is `cancelling` until the last of them has ended. Raises BatchNotFound, or BatchEnded
    if the batch had ended before.
    """
    now = db.now()
    with db.write() as connection:
        status = _lock_open(connection, batch_id)
        ended = end_stopped(connection, StopReason.CANCELLED, now, job.c.batch_id == batch_id, IS_WAITING)
        flag_in_flight(connection, StopReason.CANCELLED, now, job.c.batch_id == batch_id)
        is_unpublished = status is BatchStatus.VALIDATING
        move_batch(connection, batch_id, BatchStatus.CANCELLED if is_unpublished else BatchStatus.CANCELLING, now)
        end_batches(connection, [batch_id], now)
        stopping = select(func.count()).where(job.c.batch_id == batch_id, IS_STOPPING)
        return Stopped(ended, connection.execute(stopping).scalar_one())


def cancel_job(db: Database, job_id: str) -> Stopped:
    """Cancel one job; a repetition changes nothing more, and one that has ended stays as it is.

    Raises JobNotFound, also for a job whose batch is not published yet, or BatchEnded if all of its batch has ended.
    """
    now = db.now()
    this = job.c.id == job_id
    with db.write() as connection:
        batch_id = connection.execute(select(job.c.batch_id).where(this)).scalar_one_or_none()
        if batch_id is None or _lock_open(connection, batch_id) is BatchStatus.VALIDATING:
            raise JobNotFound(job_id)
        ended = end_stopped(connection, StopReason.CANCELLED, now, this, IS_WAITING)
        flag_in_flight(connection, StopReason.CANCELLED, now, this)
        end_batches(connection, [batch_id], now)
        stopping = select(func.count()).where(this, IS_STOPPING)
        return Stopped(ended, connection.execute(stopping).scalar_one())


def expire_due(db: Database) -> Stopped:
    """Stop the jobs whose own or whose batch's `expires_at` has passed, by the database's clock.

    Counts only what was not stopped before. Cheap, and without the write lock, while nothing is due.
    """
    now = db.now()
    with db.read() as connection:
        if not _due_batches(connection, now):
            return Stopped(0, 0)
    with db.write() as connection:
        batch_ids = lock_batches(connection, _due_batches(connection, now))
        past_window = select(batch.c.id).where(
            batch.c.id.in_(batch_ids), batch.c.status.in_(list(FED_STATUSES)), batch.c.expires_at <= now
        )
        in_fed = select(batch.c.id).where(batch.c.id.in_(batch_ids), batch.c.status.in_(list(FED_STATUSES)))
        ended = stopping = 0
        for due in (
            (job.c.batch_id.in_(past_window),),
            (job.c.expires_at <= now, IS_EXPIRING, job.c.batch_id.in_(in_fed)),
        ):
            ended += end_stopped(connection, StopReason.EXPIRED, now, *due, IS_WAITING)
            stopping += flag_in_flight(connection, StopReason.EXPIRED, now, *due)
        end_batches(connection, batch_ids, now)
    return Stopped(ended, stopping)


def pending_stops(db: Database) -> list[PendingStop]:
    """The jobs in flight that are to stop, those decided first first."""
    columns = [job.c.id, job.c.attempt, job.c.model, job.c.stop_reason, job.c.stop_at]
    query = select(*columns).where(IS_STOPPING).order_by(job.c.stop_at, job.c.id)
    with db.read() as connection:
        rows = connection.execute(query).all()
    return [PendingStop(row.id, row.attempt, row.model, StopReason(row.stop_reason), row.stop_at) for row in rows]


def settle_stops(db: Database, stops: Iterable[PendingStop]) -> int:
    """End these jobs without a text, as far as they are still in flight with that attempt; how many.

    For stops that nobody is left to carry out. An outcome that comes later is counted as a duplicate.
    """
    attempts = [{"job_id": stop.id, "job_attempt": stop.attempt} for stop in stops]
    if not attempts:
        return 0
    now = db.now()
    # An executemany takes no IN.
    is_in_flight = or_(*[job.c.state == state for state in sorted(IN_FLIGHT_STATES)])
    named = (job.c.id == bindparam("job_id"), job.c.attempt == bindparam("job_attempt"), is_in_flight)
    with db.write() as connection:
        batch_ids = lock_batches_of(connection, [str(attempt["job_id"]) for attempt in attempts])
        settled = 0
        for reason in StopReason:
            values = {"state": STOP_ENDS[reason], "recorded_at": now, **explanation(reason, now)}
            update = job.update().where(*named, job.c.stop_reason == reason).values(values)
            settled += connection.execute(update, attempts).rowcount
        end_batches(connection, batch_ids, now)
    return settled


def _lock_open(connection: Connection, batch_id: str) -> BatchStatus:
    query = select(batch.c.status).where(batch.c.id == batch_id).with_for_update()
    found = connection.execute(query).scalar_one_or_none()
    if found is None:
        raise BatchNotFound(batch_id)
    if found in TERMINAL_STATUSES:
        raise BatchEnded(batch_id, found)
    return BatchStatus(found)


def _due_batches(connection: Connection, now: float) -> list[str]:
    """Batches with jobs that are to be stopped now."""
    is_unstopped = exists().where(
        job.c.batch_id == batch.c.id, job.c.state.in_(list(OPEN_STATES)), job.c.stop_reason.is_(None)
    )
    has_due_jobs = select(job.c.batch_id).where(job.c.expires_at <= now, IS_EXPIRING)
    query = select(batch.c.id).where(
        batch.c.status.in_(list(FED_STATUSES)),
        or_((batch.c.expires_at <= now) & is_unstopped, batch.c.id.in_(has_due_jobs)),
    )
    return list(connection.execute(query).scalars())
