"""The life cycle of batches and jobs: the only place that says which transition is allowed.

Batch:  validating → in_progress → finalizing → completed
                   ↘ failed     ↘ cancelling → cancelled, ↘ expired
Job:    waiting → queued → running → completed | failed | cancelled | expired
        (back to waiting: its publication failed; running → queued: its worker was lost)

Statuses of a batch are those of OpenAI's Batch API. `completed` says that every line has ended, not that
every line succeeded: the counts tell.
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
#: statuses that end a batch
TERMINAL_STATUSES = frozenset({_B.COMPLETED, _B.FAILED, _B.EXPIRED, _B.CANCELLED})


def states_before(target: JobState) -> list[JobState]:
    """The states, within one attempt, from which a job may move to `target`; in a stable order."""
    return [state for state in JobState if target in JOB_TRANSITIONS[state] and state in OPEN_STATES]


def statuses_before(target: BatchStatus) -> list[BatchStatus]:
    """The statuses from which a batch may move to `target` without a retry; in a stable order."""
    return [s for s in BatchStatus if target in BATCH_TRANSITIONS[s] and s not in TERMINAL_STATUSES]
