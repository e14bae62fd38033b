"""The life cycle of batches and jobs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import storage
from storage.states import (
    BATCH_TRANSITIONS,
    DELETABLE_STATUSES,
    IN_FLIGHT_STATES,
    JOB_TRANSITIONS,
    OPEN_STATES,
    RETRYABLE_STATES,
    STOP_ENDS,
    TERMINAL_STATES,
    TERMINAL_STATUSES,
    BatchStatus,
    JobState,
    StopReason,
    states_before,
    status_at_end,
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


def test_a_stop_ends_every_open_job_in_the_state_of_its_reason() -> None:
    assert set(STOP_ENDS) == set(StopReason)
    assert all(states_before(end) == sorted(OPEN_STATES, key=list(JobState).index) for end in STOP_ENDS.values())


def test_every_end_but_completed_can_be_retried() -> None:
    assert TERMINAL_STATES - {JobState.COMPLETED} == RETRYABLE_STATES
    assert {JobState.QUEUED, JobState.RUNNING} == IN_FLIGHT_STATES


def test_a_batch_with_jobs_in_flight_cannot_be_deleted() -> None:
    assert not DELETABLE_STATUSES & {BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING}


@pytest.mark.parametrize("ran_out", [False, True])
@pytest.mark.parametrize("status", list(BatchStatus))
def test_the_last_job_moves_a_batch_only_where_it_may_go(status: BatchStatus, ran_out: bool) -> None:
    target = status_at_end(status, ran_out=ran_out)
    assert target is None or (target in BATCH_TRANSITIONS[status] and target in TERMINAL_STATUSES)
    stays = status in TERMINAL_STATUSES | {BatchStatus.VALIDATING}
    assert (target is None) == stays


def test_only_a_batch_in_progress_can_run_out_of_time() -> None:
    expiring = {status for status in BatchStatus if status_at_end(status, ran_out=True) is BatchStatus.EXPIRED}
    assert expiring == {BatchStatus.IN_PROGRESS}


def test_no_other_module_spells_a_state_in_sql() -> None:
    """Upgrades apart, which are written once for the schema of their time."""
    names = {f"'{name.value}'" for kind in (JobState, BatchStatus) for name in kind}
    for path in Path(storage.__path__[0]).glob("*.py"):
        if path.name in ("migrations.py", "states.py"):
            continue
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and any(name in text for name in names)], path.name
