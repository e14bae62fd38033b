"""Jobs on their way: claimed for the queue, reported live, ended once, read back in input order.

Every change of a job's state happens in one write transaction and only from the states that `storage.states`
allows. On PostgreSQL rows are locked in one order, batches before jobs, each by id.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, bindparam, exists, func, or_, select

from storage.database import Database
from storage.errors import BatchNotFound, JobNotFound
from storage.records import ClaimedJob, Counts, InFlightJob, JobRow, Progress, RunningJob, Window
from storage.states import BatchStatus, JobState, states_before
from storage.tables import IS_IN_FLIGHT, IS_WAITING, batch, job

#: rows read at a time when results are streamed; they come without their requests
_RESULTS_PAGE = 200

_RESULT_COLUMNS = [job.c[name] for name in JobRow.__slots__]


def claim_waiting(db: Database, model: str, *, max_jobs: int, max_bytes: int) -> list[ClaimedJob]:
    """Move waiting jobs of published batches to `queued` and return them for publication.

    Order: priority, publication of the batch, line. At most `max_jobs`, and only so many that their requests
    stay within `max_bytes`; if that is above 0 the first is taken whatever its size, or it would wait for
    ever. No job is returned to two claimers. If publication fails, give them back with `unclaim`.
    """
    claimed: list[ClaimedJob] = []
    if max_jobs <= 0 or max_bytes <= 0:
        return claimed
    with db.write() as connection:
        room = max_bytes
        for batch_id, priority in _batches_with_waiting(connection, model):
            rows, is_full = _within(_waiting(connection, batch_id, model, max_jobs - len(claimed)), room, not claimed)
            claimed += [ClaimedJob(**row, priority=priority) for row in _requests(connection, rows)]
            room -= sum(row["request_bytes"] for row in rows)
            if is_full or len(claimed) == max_jobs:
                break
        _mark_claimed(connection, [item.id for item in claimed], db.now())
    return claimed


def unclaim(db: Database, jobs: Iterable[ClaimedJob]) -> int:
    """Give back claimed jobs that were not published; the number that were still queued."""
    keys = [{"job_id": item.id, "job_attempt": item.attempt} for item in jobs]
    return _update_each(
        db,
        keys,
        [job.c.state == JobState.QUEUED],
        {
            "state": JobState.WAITING,
            "queued_at": None,
            "claimed_at": None,
            "deliveries": job.c.deliveries - 1,
        },
    )


def mark_running(db: Database, jobs: Iterable[RunningJob]) -> int:
    """Note that these attempts are live in an engine; the number that changed.

    An ended job, or another attempt than the current one, stays as it is.
    """
    keys = [{"job_id": item.id, "job_attempt": item.attempt, "job_head": item.head} for item in jobs]
    # An executemany takes no IN.
    fresh = or_(*[job.c.state == state for state in states_before(JobState.RUNNING)])
    changed = (job.c.state != JobState.RUNNING) | job.c.head.is_distinct_from(bindparam("job_head"))
    return _update_each(db, keys, [fresh, changed], {"state": JobState.RUNNING, "head": bindparam("job_head")})


def queued_or_running(db: Database, model: str) -> list[InFlightJob]:
    """Every job that should be in the model's queue or in an engine, for the reconciler."""
    columns = [job.c[name] for name in InFlightJob.__slots__]
    query = select(*columns).where(job.c.model == model, IS_IN_FLIGHT).order_by(job.c.id)
    with db.read() as connection:
        rows = connection.execute(query).mappings().all()
    return [InFlightJob(**{**row, "state": JobState(row["state"])}) for row in rows]


def reclaim(db: Database, jobs: Iterable[InFlightJob]) -> list[ClaimedJob]:
    """Claim lost jobs again for publication under the same attempt.

    Those that have ended, or were claimed again since `jobs` was read, are left out.
    """
    wanted = {item.id: (item.attempt, item.claimed_at) for item in jobs}
    if not wanted:
        return []
    columns = [job.c.id, job.c.attempt, job.c.claimed_at]
    query = select(*columns).where(job.c.id.in_(wanted), IS_IN_FLIGHT).order_by(job.c.id).with_for_update()
    with db.write() as connection:
        lost = [row for row in connection.execute(query) if (row.attempt, row.claimed_at) == wanted[row.id]]
        ids = [row.id for row in lost]
        _mark_claimed(connection, ids, db.now())
        return [ClaimedJob(**row) for row in _claimed_rows(connection, ids)]


def window(db: Database, model: str) -> Window:
    """How many jobs, and bytes of their requests, are in flight for `model`."""
    query = select(func.count(), func.coalesce(func.sum(job.c.request_bytes), 0)).where(
        job.c.model == model, IS_IN_FLIGHT
    )
    with db.read() as connection:
        num_jobs, num_bytes = connection.execute(query).one()
    return Window(num_jobs, int(num_bytes))


def progress(db: Database, batch_id: str) -> Progress:
    """Where the batch stands, from an index alone. Raises BatchNotFound."""
    by_state = (
        select(job.c.state, func.count(), func.coalesce(func.sum(job.c.completion_tokens), 0))
        .where(job.c.batch_id == batch_id)
        .group_by(job.c.state)
    )
    with db.read() as connection:
        status = connection.execute(select(batch.c.status).where(batch.c.id == batch_id)).scalar_one_or_none()
        if status is None:
            raise BatchNotFound(batch_id)
        rows = connection.execute(by_state).all()
    counts = Counts(**{state: number for state, number, _ in rows})
    return Progress(BatchStatus(status), counts, sum(int(tokens) for _, _, tokens in rows))


def get_job(db: Database, job_id: str) -> JobRow:
    """The job with this id. Raises JobNotFound."""
    with db.read() as connection:
        row = connection.execute(select(*_RESULT_COLUMNS).where(job.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return _job_row(row)


def iterate_results(
    db: Database, batch_id: str, *, states: Collection[JobState] = (), after_line: int = 0
) -> Iterator[JobRow]:
    """The batch's jobs in input order, those with one of `states` if any are given, in bounded memory.

    Read page by page, each in a transaction of its own: a slow reader holds up nobody.
    """
    line = after_line
    while page := _page(db, batch_id, states, line):
        yield from page
        line = page[-1].line


def _page(db: Database, batch_id: str, states: Collection[JobState], after_line: int) -> list[JobRow]:
    query = (
        select(*_RESULT_COLUMNS)
        .where(job.c.batch_id == batch_id, job.c.line > after_line)
        .order_by(job.c.line)
        .limit(_RESULTS_PAGE)
    )
    if states:
        query = query.where(job.c.state.in_(list(states)))
    with db.read() as connection:
        return [_job_row(row) for row in connection.execute(query).mappings()]


def _job_row(row: RowMapping) -> JobRow:
    return JobRow(
        **{
            **row,
            "state": JobState(row["state"]),
            "token_ids": tuple(json.loads(row["token_ids"] or "[]")),
        }
    )


def _batches_with_waiting(connection: Connection, model: str) -> Sequence[tuple[str, int]]:
    has_waiting = exists().where(job.c.batch_id == batch.c.id, job.c.model == model, IS_WAITING)
    query = (
        select(batch.c.id, batch.c.priority)
        .where(batch.c.status == BatchStatus.IN_PROGRESS, has_waiting)
        .order_by(batch.c.priority, batch.c.in_progress_at, batch.c.id)
    )
    return [(row.id, row.priority) for row in connection.execute(query)]


def _waiting(connection: Connection, batch_id: str, model: str, limit: int) -> Sequence[RowMapping]:
    query = (
        select(job.c.id, job.c.request_bytes)
        .where(job.c.batch_id == batch_id, job.c.model == model, IS_WAITING)
        .order_by(job.c.line)
        .limit(limit)
        # PostgreSQL: another claimer's rows are passed over; SQLite has one writer at a time anyway.
        .with_for_update(skip_locked=True)
    )
    return connection.execute(query).mappings().all()


def _within(rows: Sequence[RowMapping], room: int, takes_first: bool) -> tuple[Sequence[RowMapping], bool]:
    """The rows from the beginning that fit into `room` bytes, and whether one did not."""
    for number, row in enumerate(rows):
        room -= row["request_bytes"]
        if room < 0 and not (takes_first and number == 0):
            return rows[:number], True
    return rows, room <= 0


def _requests(connection: Connection, rows: Sequence[RowMapping]) -> list[dict[str, Any]]:
    columns = [job.c[name] for name in ClaimedJob.__slots__ if name != "priority"]
    query = select(*columns).where(job.c.id.in_([row["id"] for row in rows])).order_by(job.c.line)
    return [dict(row) for row in connection.execute(query).mappings()]


def _claimed_rows(connection: Connection, ids: Sequence[str]) -> Sequence[RowMapping]:
    columns = [batch.c.priority if name == "priority" else job.c[name] for name in ClaimedJob.__slots__]
    query: Select[Any] = select(*columns).join(batch, batch.c.id == job.c.batch_id)
    return connection.execute(query.where(job.c.id.in_(ids)).order_by(job.c.id)).mappings().all()


def _mark_claimed(connection: Connection, ids: Sequence[str], now: float) -> None:
    connection.execute(
        job.update()
        .where(job.c.id.in_(ids), job.c.state.in_(states_before(JobState.QUEUED)))
        .values(
            state=JobState.QUEUED,
            queued_at=func.coalesce(job.c.queued_at, now),
            claimed_at=now,
            deliveries=job.c.deliveries + 1,
        )
    )


def _update_each(
    db: Database,
    keys: list[dict[str, Any]],
    conditions: Sequence[ColumnElement[bool]],
    values: dict[str, Any],
) -> int:
    if not keys:
        return 0
    update = job.update().where(job.c.id == bindparam("job_id"), job.c.attempt == bindparam("job_attempt"))
    keys = sorted(keys, key=lambda key: str(key["job_id"]))
    with db.write() as connection:
        return connection.execute(update.where(*conditions).values(values), keys).rowcount
