"""Retries: the one way out of an end, with a new attempt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import RowMapping, case, select

from storage.database import Database
from storage.errors import BatchIncomplete, BatchNotFound, BatchOpen
from storage.job_records import OutcomeRow
from storage.states import BATCH_TRANSITIONS, RETRYABLE_STATES, TERMINAL_STATUSES, BatchStatus, JobState
from storage.tables import batch, job

#: what an attempt leaves in its job's row; a new attempt begins without it
_ATTEMPT_COLUMNS = (
    *[name for name in OutcomeRow.__slots__ if name in job.c and name not in ("attempt", "state")],
    "completion_tokens",
    "e2e_tps",
    "acceptance",
    "queue_s",
    "queued_at",
    "claimed_at",
    "recorded_at",
    "stop_reason",
    "stop_at",
    "profile_key",
)
_END_STAMPS = ("finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


def retry_batch(db: Database, batch_id: str, states: Collection[JobState], *, expires_at: float | None = None) -> int:
    """Let the ended batch's jobs with one of `states` wait again under a new attempt; how many.

    If there are any, the batch is in progress again. `expires_at` replaces the batch's; without it one that has
    passed is dropped. A job's own deadline is dropped if it has passed. Records of the attempts before are stale
    from now on. Raises BatchNotFound, BatchOpen, BatchIncomplete, and ValueError for a state no retry may leave.
    """
    if wrong := sorted(set(states) - RETRYABLE_STATES):
        raise ValueError(f"a job that is {wrong[0]} cannot be retried")
    now = db.now()
    with db.write() as connection:
        query = select(batch).where(batch.c.id == batch_id).with_for_update()
        found = connection.execute(query).mappings().one_or_none()
        _check(batch_id, found)
        update = job.update().where(job.c.batch_id == batch_id, job.c.state.in_(list(states)))
        retried = connection.execute(update.values(_new_attempt(now))).rowcount
        if found is not None and retried:
            window = expires_at if expires_at is not None else _unless_passed(found["expires_at"], now)
            values = {"status": BatchStatus.IN_PROGRESS, "expires_at": window, **dict.fromkeys(_END_STAMPS)}
            connection.execute(batch.update().where(batch.c.id == batch_id).values(values))
    return retried


def _check(batch_id: str, found: RowMapping | None) -> None:
    if found is None:
        raise BatchNotFound(batch_id)
    status = BatchStatus(found["status"])
    if status not in TERMINAL_STATUSES or BatchStatus.IN_PROGRESS not in BATCH_TRANSITIONS[status]:
        raise BatchOpen(batch_id, status)
    if found["in_progress_at"] is None:
        raise BatchIncomplete(batch_id)


def _new_attempt(now: float) -> dict[str, Any]:
    return {
        **dict.fromkeys(_ATTEMPT_COLUMNS),
        "state": JobState.WAITING,
        "attempt": job.c.attempt + 1,
        "expires_at": case((job.c.expires_at > now, job.c.expires_at), else_=None),
        "duplicate_records": 0,
    }


def _unless_passed(expires_at: float | None, now: float) -> float | None:
    return expires_at if expires_at is not None and expires_at > now else None
