"""Retries: the one way out of an end, with a new attempt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, case, func, select

from storage.batch_records import END_TIMES
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


@dataclass(frozen=True, slots=True)
class RetryChoice:
    """Which jobs of a batch run again: those that meet all of this."""

    states: frozenset[JobState]
    #: codes of their errors; none: any
    codes: frozenset[str] = frozenset()
    #: codes that are left out
    but_codes: frozenset[str] = frozenset()
    #: their ids; none: any
    job_ids: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if wrong := sorted(self.states - RETRYABLE_STATES):
            raise ValueError(f"a job that is {wrong[0]} cannot be retried")

    @classmethod
    def of(cls, *states: JobState) -> RetryChoice:
        """Every job with one of these states."""
        return cls(frozenset(states))

    def clauses(self) -> list[ColumnElement[bool]]:
        """For a WHERE."""
        wanted: list[ColumnElement[bool]] = [job.c.state.in_(sorted(self.states))]
        if self.codes:
            wanted.append(job.c.error_type.in_(sorted(self.codes)))
        if self.but_codes:
            wanted.append(func.coalesce(job.c.error_type, "").not_in(sorted(self.but_codes)))
        if self.job_ids:
            wanted.append(job.c.id.in_(sorted(self.job_ids)))
        return wanted


def retry_batch(db: Database, batch_id: str, choice: RetryChoice, *, expires_at: float | None = None) -> int:
    """Let the ended batch's chosen jobs wait again under a new attempt; how many.

    If there are any, the batch is in progress again, and the time since its end counts in none of its figures.
    `expires_at` replaces the batch's; without it one that has passed is dropped. A job's own deadline is dropped if it
    has passed. Records of the attempts before are stale from now on. Raises BatchNotFound, BatchOpen or
    BatchIncomplete.
    """
    now = db.now()
    with db.write() as connection:
        query = select(batch).where(batch.c.id == batch_id).with_for_update()
        found = connection.execute(query).mappings().one_or_none()
        if found is None:
            raise BatchNotFound(batch_id)
        _check(batch_id, found)
        update = job.update().where(job.c.batch_id == batch_id, *choice.clauses())
        retried = connection.execute(update.values(_new_attempt(now))).rowcount
        if retried:
            values = {
                "status": BatchStatus.IN_PROGRESS,
                "expires_at": expires_at if expires_at is not None else _unless_passed(found["expires_at"], now),
                "idle_s": found["idle_s"] + max(0.0, now - _ended_at(found, now)),
                **dict.fromkeys(_END_STAMPS),
            }
            connection.execute(batch.update().where(batch.c.id == batch_id).values(values))
    return retried


def count_failures(db: Database, batch_id: str, codes: Collection[str]) -> dict[str, int]:
    """How many jobs of the batch ended with each of these codes, those with none left out."""
    query = (
        select(job.c.error_type, func.count().label("number"))
        .where(job.c.batch_id == batch_id, job.c.error_type.in_(sorted(codes)))
        .group_by(job.c.error_type)
    )
    with db.read() as connection:
        return {row.error_type: row.number for row in connection.execute(query)}


def find_jobs(db: Database, batch_id: str, custom_ids: Collection[str]) -> dict[str, str]:
    """The ids of the batch's jobs with these custom_ids, by custom_id; what there is not is left out."""
    query = select(job.c.custom_id, job.c.id).where(job.c.batch_id == batch_id, job.c.custom_id.in_(list(custom_ids)))
    with db.read() as connection:
        return {row.custom_id: row.id for row in connection.execute(query)}


def _check(batch_id: str, found: RowMapping) -> None:
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


def _ended_at(found: RowMapping, now: float) -> float:
    ends = (found[name] for name in END_TIMES)
    return next((float(end) for end in ends if end is not None), now)


def _unless_passed(expires_at: float | None, now: float) -> float | None:
    return expires_at if expires_at is not None and expires_at > now else None
