"""The life cycle of batches and jobs."""

from __future__ import annotations

from storage.states import (
    BATCH_TRANSITIONS,
    JOB_TRANSITIONS,
    OPEN_STATES,
    TERMINAL_STATES,
    BatchStatus,
    JobState,
    states_before,
    statuses_before,
)


def test_every_state_and_status_has_its_transitions() -> None:
    assert set(JOB_TRANSITIONS) == set(JobState)
    assert set(BATCH_TRANSITIONS) == set(BatchStatus)


def test_every_state_can_be_reached() -> None:
    assert set().union(*JOB_TRANSITIONS.values()) == set(JobState)
    assert set().union(*BATCH_TRANSITIONS.values()) == set(BatchStatus) - {BatchStatus.VALIDATING}


def test_every_open_state_can_end_in_every_way() -> None:
    assert all(JOB_TRANSITIONS[state] >= TERMINAL_STATES for state in OPEN_STATES)


def test_an_ended_job_leaves_its_end_only_by_a_retry() -> None:
    assert all(JOB_TRANSITIONS[state] <= {JobState.WAITING} for state in TERMINAL_STATES)
    assert JOB_TRANSITIONS[JobState.COMPLETED] == frozenset()


def test_no_state_of_the_same_attempt_follows_an_end() -> None:
    assert all(not set(states_before(target)) & TERMINAL_STATES for target in JobState)
    assert states_before(JobState.RUNNING) == [JobState.WAITING, JobState.QUEUED, JobState.RUNNING]


def test_a_batch_is_cancelled_while_validating_or_after_cancelling() -> None:
    assert statuses_before(BatchStatus.CANCELLED) == [BatchStatus.VALIDATING, BatchStatus.CANCELLING]
