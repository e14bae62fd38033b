"""Retrying the jobs of an ended batch, on both kinds of database."""

from __future__ import annotations

import dataclasses

import pytest

from storage.batch_records import BatchRow, Counts, NewBatch
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database
from storage.errors import BatchIncomplete, BatchNotFound, BatchOpen
from storage.figures import batch_figures
from storage.job_records import ClaimedJob, Fate, JobRow, NewJob, OutcomeRow, RunningJob
from storage.jobs import claim_waiting, get_job, iterate_results, mark_running, progress
from storage.outcomes import record_outcomes
from storage.retries import RetryChoice, count_failures, find_jobs, retry_batch
from storage.states import BatchStatus, JobState
from storage.stops import cancel_batch, cancel_job, expire_due, pending_stops
from tests.integration.storage_databases import START, Clock

pytest_plugins = ["tests.integration.storage_databases"]

REQUEST = '{"prompt":"p","seed":1}'

C, F = JobState.COMPLETED, JobState.FAILED


def submit(
    db: Database, count: int, *, expires_at: float | None = None, deadlines: dict[int, float] | None = None
) -> str:
    """A published batch; `deadlines` by line."""
    submission = begin_submission(db, NewBatch("hash", expires_at=expires_at))
    own = deadlines or {}
    lines = range(1, count + 1)
    add_jobs(db, submission, [NewJob(n, f"id-{n}", "m", "u", REQUEST, own.get(n)) for n in lines])
    return publish_batch(db, submission).id


def claim(db: Database, count: int = 99) -> list[ClaimedJob]:
    return claim_waiting(db, "m", max_jobs=count, max_bytes=10**9)


def end(db: Database, *states: JobState) -> list[ClaimedJob]:
    """Claim as many jobs as there are states, and end them so."""
    claimed = claim(db, len(states))
    record_outcomes(
        db,
        [
            OutcomeRow(item.id, item.attempt, "h", state, text=f"text {item.attempt}", token_ids=(1, 2, 3), drafted=4)
            for item, state in zip(claimed, states, strict=True)
        ],
    )
    return claimed


def test_failed_jobs_wait_again_under_a_new_attempt(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 3)
    end(db, C, F, F)
    before = get_batch(db, batch_id)
    clock.now += 60

    assert retry_batch(db, batch_id, RetryChoice.of(F)) == 2

    again = get_batch(db, batch_id)
    assert (again.status, again.counts) == (BatchStatus.IN_PROGRESS, Counts(waiting=2, completed=1))
    assert (again.completed_at, again.finalizing_at, again.ended_at) == (None, None, None)
    assert again.in_progress_at == before.in_progress_at
    retried = claim(db)
    assert [(item.custom_id, item.attempt) for item in retried] == [("id-2", 2), ("id-3", 2)]

    ended = record_outcomes(db, [OutcomeRow(item.id, 2, "h", C, text="text 2") for item in retried])
    assert ended.ended_batches == (batch_id,)
    assert [job.text for job in iterate_results(db, batch_id)] == ["text 1", "text 2", "text 2"]
    assert get_batch(db, batch_id).completed_at == START + 60


def _outcome_columns(row: JobRow) -> dict[str, object]:
    """What an attempt leaves behind."""
    kept = {"id", "batch_id", "line", "custom_id", "model", "url", "state", "attempt", "deliveries", "request_bytes"}
    values = dataclasses.asdict(row)
    return {name: value for name, value in values.items() if name not in kept}


def test_nothing_of_the_attempt_before_is_left(db: Database) -> None:
    batch_id = submit(db, 2)
    fresh = _outcome_columns(get_job(db, f"{batch_id}-1"))
    first, second = claim(db)
    mark_running(db, [RunningJob(first.id, 1, "h")])
    cancel_job(db, second.id)
    record_outcomes(
        db,
        [
            OutcomeRow(first.id, 1, "h", F, "text", (1,), "stop", "x", "y", 3, 1.0, 2.0, 0.1, 5.0, 1, 2.0, 4, 3, 1, 9),
            OutcomeRow(first.id, 1, "h", F),
            OutcomeRow(second.id, 1, "h", JobState.CANCELLED, "partial"),
        ],
    )

    assert retry_batch(db, batch_id, RetryChoice.of(F, JobState.CANCELLED)) == 2

    for line in (1, 2):
        assert _outcome_columns(get_job(db, f"{batch_id}-{line}")) == fresh
    assert pending_stops(db) == []


def test_a_record_of_the_attempt_before_is_stale(db: Database) -> None:
    batch_id = submit(db, 1)
    (job,) = end(db, F)
    retry_batch(db, batch_id, RetryChoice.of(F))

    late = record_outcomes(db, [OutcomeRow(job.id, 1, "h", C, text="late")])
    assert late.fates == (Fate.STALE,)
    assert mark_running(db, [RunningJob(job.id, 1, "h")]) == 0
    assert (get_job(db, job.id).state, get_job(db, job.id).stale_records) == (JobState.WAITING, 1)


def test_a_retry_that_finds_no_job_leaves_the_batch_ended(db: Database) -> None:
    batch_id = submit(db, 2)
    end(db, C, F)
    before = get_batch(db, batch_id)

    assert retry_batch(db, batch_id, RetryChoice.of(JobState.EXPIRED, JobState.CANCELLED)) == 0
    assert retry_batch(db, batch_id, RetryChoice.of()) == 0
    assert get_batch(db, batch_id) == before


def test_a_completed_job_is_never_retried(db: Database) -> None:
    batch_id = submit(db, 1)
    end(db, C)
    with pytest.raises(ValueError, match="completed cannot be retried"):
        retry_batch(db, batch_id, RetryChoice.of(C, F))


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.QUEUED, JobState.RUNNING])
def test_an_open_job_is_never_retried(db: Database, state: JobState) -> None:
    with pytest.raises(ValueError, match="cannot be retried"):
        retry_batch(db, submit(db, 1), RetryChoice.of(state))


def fail(db: Database, *codes: str) -> list[ClaimedJob]:
    """Claim as many jobs as there are codes, and let them fail so."""
    claimed = claim(db, len(codes))
    pairs = zip(claimed, codes, strict=True)
    record_outcomes(db, [OutcomeRow(item.id, item.attempt, "h", F, error_type=code) for item, code in pairs])
    return claimed


def test_jobs_are_chosen_by_their_error_codes_and_left_out_by_them(db: Database) -> None:
    batch_id = submit(db, 4)
    fail(db, "memory", "tries", "too_long", "tries")
    assert count_failures(db, batch_id, {"too_long", "tries", "other"}) == {"too_long": 1, "tries": 2}

    assert retry_batch(db, batch_id, RetryChoice(frozenset({F}), codes=frozenset({"tries"}))) == 2
    assert [(item.custom_id, item.attempt) for item in fail(db, "tries", "tries")] == [("id-2", 2), ("id-4", 2)]

    assert retry_batch(db, batch_id, RetryChoice(frozenset({F}), but_codes=frozenset({"too_long", "memory"}))) == 2
    assert [item.custom_id for item in fail(db, "tries", "tries")] == ["id-2", "id-4"]


def test_a_job_without_an_error_code_is_not_left_out_by_one(db: Database) -> None:
    batch_id = submit(db, 1)
    end(db, F)
    assert get_job(db, f"{batch_id}-1").error_type is None
    assert retry_batch(db, batch_id, RetryChoice(frozenset({F}), but_codes=frozenset({"too_long"}))) == 1


def test_single_jobs_are_found_by_custom_id_and_run_again_alone(db: Database) -> None:
    batch_id = submit(db, 3)
    fail(db, "a", "b", "c")
    assert find_jobs(db, batch_id, ["id-2", "id-9"]) == {"id-2": f"{batch_id}-2"}
    assert retry_batch(db, batch_id, RetryChoice(frozenset({F}), job_ids=frozenset({f"{batch_id}-2"}))) == 1
    assert [item.custom_id for item in claim(db)] == ["id-2"]


def test_the_time_between_an_end_and_a_retry_counts_in_no_speed(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 2)
    clock.now += 10
    end(db, C, F)
    assert batch_figures(db, batch_id).wall_s == 10
    for wall_s in (10, 15):
        clock.now += 3600
        assert retry_batch(db, batch_id, RetryChoice.of(F)) == 1
        assert batch_figures(db, batch_id).wall_s == wall_s
        clock.now += 5
        end(db, F)
    row = get_batch(db, batch_id)
    assert (row.idle_s, row.working_since) == (7200, START + 7200)
    assert batch_figures(db, batch_id).wall_s == 20
    clock.now += 60
    assert batch_figures(db, batch_id).wall_s == 20


def test_a_retry_that_runs_nothing_leaves_the_figures_as_they_are(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 1)
    clock.now += 10
    end(db, C)
    clock.now += 50
    assert retry_batch(db, batch_id, RetryChoice.of(F)) == 0
    assert (get_batch(db, batch_id).idle_s, batch_figures(db, batch_id).wall_s) == (0, 10)


def test_a_batch_that_has_not_ended_cannot_be_retried(db: Database) -> None:
    batch_id = submit(db, 2)
    end(db, F)
    with pytest.raises(BatchOpen, match=f"{batch_id} has not ended: it is in_progress"):
        retry_batch(db, batch_id, RetryChoice.of(F))
    claim(db)
    cancel_batch(db, batch_id)
    with pytest.raises(BatchOpen, match="it is cancelling"):
        retry_batch(db, batch_id, RetryChoice.of(F))
    with pytest.raises(BatchNotFound):
        retry_batch(db, "batch_none", RetryChoice.of(F))


def test_a_batch_that_was_cancelled_while_it_was_written_cannot_be_retried(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, [NewJob(1, "id-1", "m", "u", REQUEST)])
    cancel_batch(db, submission.batch.id)
    with pytest.raises(BatchIncomplete, match="before all of its file was written"):
        retry_batch(db, submission.batch.id, RetryChoice.of(JobState.CANCELLED))


def _expired(db: Database, clock: Clock) -> BatchRow:
    batch_id = submit(db, 2, expires_at=START + 10)
    end(db, F)
    clock.now = START + 20
    expire_due(db)
    return get_batch(db, batch_id)


def test_a_passed_window_is_dropped_by_a_retry(db: Database, clock: Clock) -> None:
    batch = _expired(db, clock)
    assert batch.status is BatchStatus.EXPIRED

    assert retry_batch(db, batch.id, RetryChoice.of(JobState.EXPIRED)) == 1
    assert (get_batch(db, batch.id).expires_at, get_batch(db, batch.id).expired_at) == (None, None)
    assert expire_due(db).ended == 0
    end(db, C)
    assert get_batch(db, batch.id).status is BatchStatus.COMPLETED


def test_a_new_window_replaces_a_passed_one(db: Database, clock: Clock) -> None:
    batch = _expired(db, clock)
    retry_batch(db, batch.id, RetryChoice.of(JobState.EXPIRED), expires_at=START + 30)
    assert get_batch(db, batch.id).expires_at == START + 30

    clock.now = START + 30
    expire_due(db)
    again = get_batch(db, batch.id)
    assert (again.status, again.expired_at) == (BatchStatus.EXPIRED, START + 30)


def test_jobs_that_expired_before_do_not_expire_a_batch_again(db: Database, clock: Clock) -> None:
    batch = _expired(db, clock)
    retry_batch(db, batch.id, RetryChoice.of(F), expires_at=START + 99)
    end(db, C)
    again = get_batch(db, batch.id)
    assert (again.status, again.counts) == (BatchStatus.COMPLETED, Counts(completed=1, expired=1))


def test_a_window_that_has_not_passed_is_kept(db: Database) -> None:
    batch_id = submit(db, 1, expires_at=START + 50)
    end(db, F)
    retry_batch(db, batch_id, RetryChoice.of(F))
    assert get_batch(db, batch_id).expires_at == START + 50


def test_a_deadline_of_a_job_is_dropped_only_if_it_has_passed(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 2, deadlines={1: START + 5, 2: START + 50})
    clock.now += 6
    expire_due(db)
    end(db, F)
    assert retry_batch(db, batch_id, RetryChoice.of(F, JobState.EXPIRED)) == 2

    assert (expire_due(db).ended, progress(db, batch_id).counts) == (0, Counts(waiting=2))
    clock.now = START + 50
    assert expire_due(db).ended == 1
    assert get_job(db, f"{batch_id}-2").error_type == "deadline_exceeded"


def test_a_retried_job_can_be_cancelled_and_retried_again(db: Database) -> None:
    batch_id = submit(db, 1)
    end(db, F)
    for attempt in (2, 3, 4):
        state = F if attempt == 2 else JobState.CANCELLED
        assert retry_batch(db, batch_id, RetryChoice.of(state)) == 1
        assert get_job(db, f"{batch_id}-1").attempt == attempt
        cancel_batch(db, batch_id)
        assert get_batch(db, batch_id).status is BatchStatus.CANCELLED
