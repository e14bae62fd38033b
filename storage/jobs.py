"""Jobs on their way: claimed for the queue, given back, reported live, claimed again.

Every change of a job's state happens in one write transaction and only from the states that `storage.states`
allows. On PostgreSQL rows are locked in one order, batches before jobs, each by id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import ceil

from sqlalchemy import ColumnElement, Connection, RowMapping, bindparam, case, exists, func, or_, select

from storage.batch_records import Counts, Progress
from storage.database import Database
from storage.endings import end_batches, explanation, lock_batches_of
from storage.errors import BatchNotFound, JobNotFound
from storage.job_records import ClaimedJob, InFlightJob, JobRow, RunningJob, Window
from storage.job_rows import read_rows, with_large
from storage.states import FED_STATUSES, STOP_ENDS, TERMINAL_STATES, BatchStatus, JobState, states_before
from storage.tables import IS_IN_FLIGHT, IS_WAITING, batch, job
from storage.turns import Contender, in_turn

#: the attempt that the parameters of a statement name
_NAMED = (job.c.id == bindparam("job_id"), job.c.attempt == bindparam("job_attempt"))


def contenders(db: Database, model: str) -> list[Contender]:
    """The published batches with waiting jobs for a served name, in no order."""
    with db.read() as connection:
        return _contenders(connection, model)


def claim_waiting(
    db: Database,
    model: str,
    *,
    max_jobs: int,
    max_bytes: int,
    priority: int | None = None,
    without: Collection[str] = (),
) -> list[ClaimedJob]:
    """Move waiting jobs of published batches to `queued` and return them, in the order of their publication.

    That order is `storage.turns.in_turn`, a batch's jobs in the order of their lines; with `priority` only batches of
    that one are looked at, and those in `without` never. At most `max_jobs`, and only so many that their requests stay
    within `max_bytes`; if that is above 0 the first is taken whatever its size, or it would wait for ever. No job is
    returned to two claimers. If publication fails, give them back with `unclaim`.
    """
    if max_jobs <= 0 or max_bytes <= 0:
        return []
    with db.write() as connection:
        batches = [item for item in _contenders(connection, model, priority) if item.batch_id not in without]
        page = ceil(max_jobs / max(1, len(batches)))
        turns = in_turn(batches, lambda batch_id: _waiting(connection, batch_id, model, page))
        ids = _within(turns, max_jobs, max_bytes)
        _mark_claimed(connection, ids, db.now())
        return _claimed_jobs(connection, ids)


def unclaim(db: Database, jobs: Iterable[ClaimedJob | InFlightJob]) -> int:
    """Give back claimed jobs whose messages stand in no queue; the number that were still queued.

    Those that are to stop end instead: nobody holds them.
    """
    keys = [{"job_id": item.id, "job_attempt": item.attempt} for item in jobs]
    if not keys:
        return 0
    now = db.now()
    given_back = [*_NAMED, *_one_of(states_before(JobState.WAITING))]
    values = {"queued_at": None, "claimed_at": None, "deliveries": job.c.deliveries - 1}
    with db.write() as connection:
        batch_ids = lock_batches_of(connection, [str(key["job_id"]) for key in keys])
        number = 0
        for reason, end in STOP_ENDS.items():
            changes = {**values, "state": end, "recorded_at": now, **explanation(reason, now)}
            update = job.update().where(*given_back, job.c.stop_reason == reason).values(changes)
            number += connection.execute(update, keys).rowcount
        update = job.update().where(*given_back, job.c.stop_reason.is_(None))
        number += connection.execute(update.values({**values, "state": JobState.WAITING}), keys).rowcount
        end_batches(connection, batch_ids, now)
    return number


def mark_running(db: Database, jobs: Iterable[RunningJob]) -> int:
    """Note that these attempts are live in an engine; the number that changed.

    An ended job, or another attempt than the current one, stays as it is.
    """
    keys = [{"job_id": item.id, "job_attempt": item.attempt, "job_head": item.head} for item in jobs]
    if not keys:
        return 0
    changed = (job.c.state != JobState.RUNNING) | job.c.head.is_distinct_from(bindparam("job_head"))
    update = job.update().where(*_NAMED, *_one_of(states_before(JobState.RUNNING)), changed)
    with db.write() as connection:
        lock_batches_of(connection, [str(key["job_id"]) for key in keys])
        return connection.execute(update.values(state=JobState.RUNNING, head=bindparam("job_head")), keys).rowcount


def queued_or_running(db: Database, model: str) -> list[InFlightJob]:
    """Every job that should be in the model's queue or in an engine, for the reconciler."""
    columns = [job.c[name] for name in InFlightJob.__slots__]
    query = select(*columns).where(job.c.model == model, IS_IN_FLIGHT).order_by(job.c.id)
    with db.read() as connection:
        rows = connection.execute(query).mappings().all()
    return [InFlightJob(**{**row, "state": JobState(row["state"])}) for row in rows]


def reclaim(db: Database, jobs: Iterable[InFlightJob]) -> list[ClaimedJob]:
    """Claim lost jobs again for publication under the same attempt.

    Those that have ended, are to stop, or were claimed again since `jobs` was read, are left out.
    """
    wanted = {item.id: (item.attempt, item.claimed_at) for item in jobs}
    if not wanted:
        return []
    columns = [job.c.id, job.c.attempt, job.c.claimed_at]
    query = select(*columns).where(job.c.id.in_(wanted), IS_IN_FLIGHT, job.c.stop_reason.is_(None)).order_by(job.c.id)
    with db.write() as connection:
        lock_batches_of(connection, wanted)
        rows = connection.execute(query.with_for_update()).all()
        ids = [row.id for row in rows if (row.attempt, row.claimed_at) == wanted[row.id]]
        _mark_claimed(connection, ids, db.now())
        return _claimed_jobs(connection, ids)


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
    generated = case((job.c.reused_from.is_(None), job.c.completion_tokens), else_=0)
    by_state = (
        select(job.c.state, func.count(), func.coalesce(func.sum(generated), 0))
        .where(job.c.batch_id == batch_id)
        .group_by(job.c.state)
    )
    with db.read() as connection:
        status = connection.execute(select(batch.c.status).where(batch.c.id == batch_id)).scalar_one_or_none()
        if status is None:
            raise BatchNotFound(batch_id)
        rows = connection.execute(by_state).all()
    counts = Counts(**{state: number for state, number, _ in rows})
    tokens = {state: int(number) for state, _, number in rows}
    stopped = sum(tokens.get(state, 0) for state in STOP_ENDS.values())
    return Progress(BatchStatus(status), counts, sum(tokens.values()), stopped)


def open_models(db: Database, batch_id: str) -> frozenset[str]:
    """The served names that the batch's open jobs ask for."""
    open_states = [state for state in JobState if state not in TERMINAL_STATES]
    query = select(job.c.model).where(job.c.batch_id == batch_id, job.c.state.in_(open_states)).distinct()
    with db.read() as connection:
        return frozenset(connection.execute(query).scalars())


def open_jobs(db: Database) -> dict[tuple[str, JobState], int]:
    """How many jobs of published batches have not ended, by served name and state."""
    query = (
        select(job.c.model, job.c.state, func.count())
        .join(batch, batch.c.id == job.c.batch_id)
        .where(batch.c.status != BatchStatus.VALIDATING, or_(IS_WAITING, IS_IN_FLIGHT))
        .group_by(job.c.model, job.c.state)
    )
    with db.read() as connection:
        return {(model, JobState(state)): number for model, state, number in connection.execute(query)}


def awaited_models(db: Database) -> frozenset[str]:
    """The served names that waiting jobs of published batches ask for."""
    published = select(batch.c.id).where(batch.c.status == BatchStatus.IN_PROGRESS)
    query = select(job.c.model).where(IS_WAITING, job.c.batch_id.in_(published)).distinct()
    with db.read() as connection:
        return frozenset(connection.execute(query).scalars())


def get_job(db: Database, job_id: str) -> JobRow:
    """The job with this id. Raises JobNotFound."""
    found = read_rows(db, job.c.id == job_id, limit=1)
    if not found:
        raise JobNotFound(job_id)
    return next(with_large(db, found))


def iterate_results(
    db: Database,
    batch_id: str,
    *,
    states: Collection[JobState] = (),
    after_line: int = 0,
    logprobs: bool = False,
) -> Iterator[JobRow]:
    """The batch's jobs in input order, those with one of `states` if any are given, in bounded memory.

    Read page by page, each in a transaction of its own: a slow reader holds up nobody. Only with `logprobs` have the
    rows theirs.
    """
    wanted = [job.c.batch_id == batch_id, *([job.c.state.in_(list(states))] if states else [])]
    line = after_line
    while page := read_rows(db, *wanted, job.c.line > line):
        yield from with_large(db, page, logprobs=logprobs)
        line = page[-1].line


def _contenders(connection: Connection, model: str, priority: int | None = None) -> list[Contender]:
    has_waiting = exists().where(job.c.batch_id == batch.c.id, job.c.model == model, IS_WAITING)
    in_flight = (
        select(job.c.batch_id, func.count().label("number"))
        .where(job.c.model == model, IS_IN_FLIGHT)
        .group_by(job.c.batch_id)
        .subquery()
    )
    query = (
        select(batch.c.id, batch.c.priority, func.coalesce(in_flight.c.number, 0), batch.c.in_progress_at)
        .outerjoin(in_flight, in_flight.c.batch_id == batch.c.id)
        .where(batch.c.status.in_(list(FED_STATUSES)), has_waiting)
    )
    if priority is not None:
        query = query.where(batch.c.priority == priority)
    return [Contender(*row) for row in connection.execute(query)]


def _waiting(connection: Connection, batch_id: str, model: str, page: int) -> Iterator[RowMapping]:
    query = (
        select(job.c.id, job.c.line, job.c.request_bytes)
        .where(job.c.batch_id == batch_id, job.c.model == model, IS_WAITING)
        .order_by(job.c.line)
        .limit(page)
        # PostgreSQL: another claimer's rows are passed over; SQLite has one writer at a time anyway.
        .with_for_update(skip_locked=True)
    )
    line = 0
    while rows := connection.execute(query.where(job.c.line > line)).mappings().all():
        yield from rows
        line = rows[-1]["line"]


def _within(rows: Iterable[RowMapping], max_jobs: int, max_bytes: int) -> list[str]:
    """The ids of the rows from the beginning that fit."""
    ids: list[str] = []
    for row in islice(rows, max_jobs):
        max_bytes -= row["request_bytes"]
        if max_bytes < 0 and ids:
            break
        ids.append(row["id"])
    return ids


def _claimed_jobs(connection: Connection, ids: Sequence[str]) -> list[ClaimedJob]:
    columns = [batch.c.priority if name == "priority" else job.c[name] for name in ClaimedJob.__slots__]
    query = select(*columns).join(batch, batch.c.id == job.c.batch_id).where(job.c.id.in_(ids))
    found = {row["id"]: ClaimedJob(**row) for row in connection.execute(query).mappings()}
    return [found[job_id] for job_id in ids]


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


def _one_of(states: Iterable[JobState]) -> list[ColumnElement[bool]]:
    """As a condition; an executemany takes no IN."""
    return [or_(*[job.c.state == state for state in states])]
