"""The life cycle of batches and jobs: the only place that says which transition is allowed.

Batch:  validating → in_progress → finalizing → completed
                   ↘ failed     ↘ cancelling → cancelled, ↘ expired
Job:    waiting → queued → running → completed | failed | cancelled | expired
        (back to waiting: its publication failed; running → queued: its worker was lost)

Statuses of a batch are those of OpenAI's Batch API. `completed` says that every line has ended, not that
every line succeeded: the counts tell. `docs/architecture.md` tabulates who makes which transition; every
condition of an SQL statement is taken from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class BatchStatus(StrEnum):
    """Where a batch stands."""

    #: its lines are being checked and written; no job of it is visible to the feeder
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class JobState(StrEnum):
    """Where a job stands."""

    #: in the database only
    WAITING = "waiting"
    #: claimed by the feeder: its message is, or is about to be, in the queue
    QUEUED = "queued"
    #: an engine has reported it live
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class StopReason(StrEnum):
    """Why the database has decided that a job shall end before its text does."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


class StopCode(StrEnum):
    """The error code of a job that was stopped."""

    CANCELLED = "cancelled"
    #: its batch's completion window ended
    BATCH_EXPIRED = "batch_expired"
    #: its own deadline passed
    DEADLINE_EXCEEDED = "deadline_exceeded"


_B, _J = BatchStatus, JobState

BATCH_TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    _B.VALIDATING: frozenset({_B.IN_PROGRESS, _B.FAILED, _B.CANCELLED}),
    _B.IN_PROGRESS: frozenset({_B.FINALIZING, _B.COMPLETED, _B.CANCELLING, _B.EXPIRED}),
    _B.FINALIZING: frozenset({_B.COMPLETED}),
    _B.CANCELLING: frozenset({_B.CANCELLED}),
    # Only a user's retry opens an ended batch again.
    _B.COMPLETED: frozenset({_B.IN_PROGRESS}),
    _B.EXPIRED: frozenset({_B.IN_PROGRESS}),
    _B.CANCELLED: frozenset({_B.IN_PROGRESS}),
    _B.FAILED: frozenset(),
}

_ENDS = frozenset({_J.COMPLETED, _J.FAILED, _J.CANCELLED, _J.EXPIRED})

JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    # A publication whose reply was lost may run although its claim was given back.
    _J.WAITING: _ENDS | {_J.QUEUED, _J.RUNNING},
    _J.QUEUED: _ENDS | {_J.WAITING, _J.QUEUED, _J.RUNNING},
    _J.RUNNING: _ENDS | {_J.QUEUED, _J.RUNNING},
    # Only a user's retry, with a new attempt, leaves an end; a completed job has none.
    _J.COMPLETED: frozenset(),
    _J.FAILED: frozenset({_J.WAITING}),
    _J.CANCELLED: frozenset({_J.WAITING}),
    _J.EXPIRED: frozenset({_J.WAITING}),
}

#: states that end an attempt
TERMINAL_STATES = _ENDS
#: states of a job that still has an end before it
OPEN_STATES = frozenset(JobState) - TERMINAL_STATES
#: states of a job that may be held by a queue or an engine
IN_FLIGHT_STATES = OPEN_STATES - {_J.WAITING}
#: states that a user's retry may leave
RETRYABLE_STATES = frozenset(state for state in TERMINAL_STATES if _J.WAITING in JOB_TRANSITIONS[state])
#: statuses that end a batch
TERMINAL_STATUSES = frozenset({_B.COMPLETED, _B.FAILED, _B.EXPIRED, _B.CANCELLED})
#: statuses whose jobs are fed to the queue, and stopped when they expire
FED_STATUSES = frozenset({_B.IN_PROGRESS})
#: statuses of a batch that may be deleted: nothing of it can be in the queue
DELETABLE_STATUSES = TERMINAL_STATUSES | {_B.VALIDATING}

#: how a stopped job ends, unless another outcome comes first
STOP_ENDS: Mapping[StopReason, JobState] = {
    StopReason.CANCELLED: _J.CANCELLED,
    StopReason.EXPIRED: _J.EXPIRED,
}


def states_before(target: JobState) -> list[JobState]:
    """The states, within one attempt, from which a job may move to `target`; in a stable order."""
    return [state for state in JobState if target in JOB_TRANSITIONS[state] and state in OPEN_STATES]


def statuses_before(target: BatchStatus) -> list[BatchStatus]:
    """The statuses from which a batch may move to `target` without a retry; in a stable order."""
    return [s for s in BatchStatus if target in BATCH_TRANSITIONS[s] and s not in TERMINAL_STATUSES]


def status_at_end(status: BatchStatus, *, ran_out: bool) -> BatchStatus | None:
    """What a batch of this status becomes with its last open job; None if it stays as it is.

    `ran_out`: it has passed its `expires_at`, and jobs expired by that.
    """
    if status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if status is BatchStatus.IN_PROGRESS and ran_out:
        return BatchStatus.EXPIRED
    return BatchStatus.COMPLETED if status in statuses_before(BatchStatus.COMPLETED) else None
