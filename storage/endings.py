"""How jobs end without an engine's word, and how a batch follows its last job.

Whoever changes jobs locks their batches first (`lock_batches`), so that on PostgreSQL no two transactions wait for
each other and none misses the other's last job. Only `claim_waiting` does not: it takes rows that nobody has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import ColumnElement, Connection, Select, TextClause, and_, case, func, select

from storage.states import (
    OPEN_STATES,
    STOP_ENDS,
    BatchStatus,
    JobState,
    StopCode,
    StopReason,
    states_before,
    status_at_end,
    statuses_before,
)
from storage.tables import IS_IN_FLIGHT, batch, job

_MESSAGES = {
    StopCode.CANCELLED: "the job was cancelled before it had finished",
    StopCode.BATCH_EXPIRED: "the batch's completion window ended before the job had finished",
    StopCode.DEADLINE_EXCEEDED: "the job's deadline passed before it had finished",
}

Condition = ColumnElement[bool] | TextClause


def lock_batches(connection: Connection, batch_ids: Collection[str] | Select[tuple[str]]) -> list[str]:
    """Lock the rows of these batches in one order; the ids of those that exist."""
    query = select(batch.c.id).where(batch.c.id.in_(batch_ids)).order_by(batch.c.id).with_for_update()
    return list(connection.execute(query).scalars())


def lock_batches_of(connection: Connection, job_ids: Collection[str]) -> list[str]:
    """Lock the rows of these jobs' batches in one order; their ids."""
    return lock_batches(connection, select(job.c.batch_id).where(job.c.id.in_(job_ids)))


def end_stopped(connection: Connection, reason: StopReason, now: float, *chosen: Condition) -> int:
    """End the chosen jobs, as far as they are open, because of `reason`; how many. They have no text."""
    update = job.update().where(*chosen, job.c.state.in_(states_before(STOP_ENDS[reason])))
    values = {"state": STOP_ENDS[reason], "recorded_at": now, **explanation(reason, now)}
    return connection.execute(update.values(values)).rowcount


def flag_in_flight(connection: Connection, reason: StopReason, now: float, *chosen: Condition) -> int:
    """Note for the chosen jobs that are in flight that they are to stop; how many were not to before."""
    update = job.update().where(*chosen, IS_IN_FLIGHT, job.c.stop_reason.is_(None))
    return connection.execute(update.values(stop_reason=reason, stop_at=now)).rowcount


def explanation(reason: StopReason, now: float) -> dict[str, object]:
    """The columns that say why a job was stopped. A stop that was decided before keeps its time."""
    return {
        "stop_reason": reason,
        "stop_at": func.coalesce(job.c.stop_at, now),
        "error_type": _by_code(reason, {code: code.value for code in StopCode}),
        "error_message": _by_code(reason, _MESSAGES),
    }


def _by_code(reason: StopReason, values: dict[StopCode, str]) -> ColumnElement[str] | str:
    """Of two deadlines that have passed, the earlier one ended the job."""
    if reason is StopReason.CANCELLED:
        return values[StopCode.CANCELLED]
    window = select(batch.c.expires_at).where(batch.c.id == job.c.batch_id).correlate(job).scalar_subquery()
    is_own = job.c.expires_at <= func.coalesce(window, job.c.expires_at)
    return case((is_own, values[StopCode.DEADLINE_EXCEEDED]), else_=values[StopCode.BATCH_EXPIRED])


def end_batches(connection: Connection, batch_ids: Iterable[str], now: float) -> list[str]:
    """End those of `batch_ids` without an open job; their ids. The caller has locked the batches' rows."""
    return [
        batch_id for batch_id in batch_ids if _is_finished(connection, batch_id) and _end(connection, batch_id, now)
    ]


def move_batch(connection: Connection, batch_id: str, target: BatchStatus, now: float) -> bool:
    """Move an open batch to `target` if that is allowed from where it is; whether it was."""
    stamps = [f"{target}_at"]
    if target is BatchStatus.COMPLETED:
        # Results are read from the jobs' rows: finalizing takes no time of its own.
        stamps.append("finalizing_at")
    update = batch.update().where(batch.c.id == batch_id, batch.c.status.in_(statuses_before(target)))
    return connection.execute(update.values(status=target, **dict.fromkeys(stamps, now))).rowcount > 0


def _is_finished(connection: Connection, batch_id: str) -> bool:
    is_open = select(job.c.id).where(job.c.batch_id == batch_id, job.c.state.in_(list(OPEN_STATES)))
    return connection.execute(is_open.limit(1)).first() is None


def _end(connection: Connection, batch_id: str, now: float) -> bool:
    row = connection.execute(select(batch.c.status, batch.c.expires_at).where(batch.c.id == batch_id)).one()
    passed = row.expires_at is not None and row.expires_at <= now
    ran_out = passed and _has_expired_jobs(connection, batch_id)
    target = status_at_end(BatchStatus(row.status), ran_out=ran_out)
    return target is not None and move_batch(connection, batch_id, target, now)


def _has_expired_jobs(connection: Connection, batch_id: str) -> bool:
    expired = select(job.c.id).where(
        and_(job.c.batch_id == batch_id, job.c.state == JobState.EXPIRED, job.c.error_type == StopCode.BATCH_EXPIRED)
    )
    return connection.execute(expired.limit(1)).first() is not None
