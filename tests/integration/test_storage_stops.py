"""Cancelling and expiring jobs and batches, on both kinds of database."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.batch_records import Counts, NewBatch
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database
from storage.errors import BatchEnded, BatchNotFound, JobNotFound, SubmissionSuperseded
from storage.job_records import ClaimedJob, Fate, NewJob, OutcomeRow, PendingStop, RunningJob, Stopped
from storage.jobs import (
    claim_waiting,
    get_job,
    iterate_results,
    mark_running,
    progress,
    queued_or_running,
    reclaim,
    unclaim,
)
from storage.outcomes import record_outcomes
from storage.states import BatchStatus, JobState, StopReason
from storage.stops import cancel_batch, cancel_job, expire_due, pending_stops, settle_stops
from tests.integration.storage_databases import START, Clock

pytest_plugins = ["tests.integration.storage_databases"]

REQUEST = '{"prompt":"p","seed":1}'


def submit(
    db: Database, count: int, *, expires_at: float | None = None, deadlines: dict[int, float] | None = None
) -> str:
    """A published batch; `deadlines` by line."""
    submission = begin_submission(db, NewBatch("hash", expires_at=expires_at))
    own = deadlines or {}
    lines = range(1, count + 1)
    add_jobs(db, submission, [NewJob(n, f"id-{n}", "m", "u", REQUEST, own.get(n)) for n in lines])
    return publish_batch(db, submission).id


def claim(db: Database, count: int) -> list[ClaimedJob]:
    return claim_waiting(db, "m", max_jobs=count, max_bytes=10**9)


def stopped(item: ClaimedJob, state: JobState, text: str | None = "partial") -> OutcomeRow:
    return OutcomeRow(item.id, item.attempt, "h", state, text=text, token_ids=(1, 2))


def status(db: Database, batch_id: str) -> BatchStatus:
    return get_batch(db, batch_id).status


def test_a_batch_that_nobody_has_touched_is_cancelled_at_once(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 3)
    clock.now += 5

    assert cancel_batch(db, batch_id) == Stopped(3, 0)

    cancelled = get_batch(db, batch_id)
    assert (cancelled.status, cancelled.counts) == (BatchStatus.CANCELLED, Counts(cancelled=3))
    assert cancelled.cancelling_at == cancelled.cancelled_at == cancelled.ended_at == START + 5
    assert (cancelled.completed_at, cancelled.finalizing_at) == (None, None)
    ended = get_job(db, f"{batch_id}-1")
    assert (ended.error_type, ended.stop_reason, ended.recorded_at) == ("cancelled", StopReason.CANCELLED, START + 5)
    assert ended.error_message == "the job was cancelled before it had finished"
    assert claim(db, 9) == []


def test_jobs_in_flight_keep_their_state_until_their_engine_has_answered(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 4)
    running, queued, done = claim(db, 3)
    mark_running(db, [RunningJob(running.id, 1, "h")])
    record_outcomes(db, [stopped(done, JobState.COMPLETED, "whole")])

    assert cancel_batch(db, batch_id) == Stopped(1, 2)
    assert status(db, batch_id) is BatchStatus.CANCELLING
    assert progress(db, batch_id).counts == Counts(queued=1, running=1, completed=1, cancelled=1)
    assert {(stop.task_id, stop.reason, stop.stop_at, stop.model) for stop in pending_stops(db)} == {
        (f"{running.id}.1", StopReason.CANCELLED, START, "m"),
        (f"{queued.id}.1", StopReason.CANCELLED, START, "m"),
    }

    clock.now += 2
    assert record_outcomes(db, [stopped(running, JobState.CANCELLED)]).ended_batches == ()
    assert record_outcomes(db, [stopped(queued, JobState.COMPLETED, "came first")]).ended_batches == (batch_id,)

    assert pending_stops(db) == []
    assert status(db, batch_id) is BatchStatus.CANCELLED
    partial, whole = get_job(db, running.id), get_job(db, queued.id)
    assert (partial.state, partial.text, partial.error_type) == (JobState.CANCELLED, "partial", "cancelled")
    assert (whole.state, whole.text, whole.error_type) == (JobState.COMPLETED, "came first", None)
    assert get_batch(db, batch_id).counts == Counts(completed=2, cancelled=2)
    assert (progress(db, batch_id).completion_tokens, progress(db, batch_id).stopped_tokens) == (6, 2)


def test_cancelling_twice_changes_nothing_more(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 2)
    (job,) = claim(db, 1)
    cancel_batch(db, batch_id)
    before = (get_batch(db, batch_id), pending_stops(db))
    clock.now += 5

    assert cancel_batch(db, batch_id) == Stopped(0, 1)
    assert (get_batch(db, batch_id), pending_stops(db)) == before

    record_outcomes(db, [stopped(job, JobState.CANCELLED)])
    with pytest.raises(BatchEnded, match=f"{batch_id} has ended: it is cancelled"):
        cancel_batch(db, batch_id)


def test_an_unknown_batch_or_job_cannot_be_cancelled(db: Database) -> None:
    with pytest.raises(BatchNotFound):
        cancel_batch(db, "batch_none")
    with pytest.raises(JobNotFound):
        cancel_job(db, "batch_none-1")


def test_a_batch_that_is_still_being_written_can_be_cancelled(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, [NewJob(1, "id-1", "m", "u", REQUEST)])

    assert cancel_batch(db, submission.batch.id) == Stopped(1, 0)

    assert status(db, submission.batch.id) is BatchStatus.CANCELLED
    assert get_batch(db, submission.batch.id).cancelling_at is None
    with pytest.raises(SubmissionSuperseded):
        add_jobs(db, submission, [NewJob(2, "id-2", "m", "u", REQUEST)])
    with pytest.raises(SubmissionSuperseded):
        publish_batch(db, submission)


def test_one_job_is_cancelled_and_the_others_go_on(db: Database) -> None:
    batch_id = submit(db, 3)
    (job,) = claim(db, 1)

    assert cancel_job(db, f"{batch_id}-2") == Stopped(1, 0)
    assert cancel_job(db, f"{batch_id}-2") == Stopped(0, 0)
    assert cancel_job(db, job.id) == Stopped(0, 1)
    assert cancel_job(db, job.id) == Stopped(0, 1)
    assert status(db, batch_id) is BatchStatus.IN_PROGRESS

    record_outcomes(db, [stopped(job, JobState.CANCELLED)])
    assert cancel_job(db, f"{batch_id}-3") == Stopped(1, 0)
    assert (status(db, batch_id), get_batch(db, batch_id).counts) == (BatchStatus.COMPLETED, Counts(cancelled=3))
    with pytest.raises(BatchEnded):
        cancel_job(db, job.id)


def test_a_job_of_a_batch_that_is_not_published_is_unknown(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, [NewJob(1, "id-1", "m", "u", REQUEST)])
    with pytest.raises(JobNotFound):
        cancel_job(db, f"{submission.batch.id}-1")


def test_a_stop_that_nobody_is_left_to_carry_out_is_settled(db: Database) -> None:
    batch_id = submit(db, 2)
    one, _ = claim(db, 2)
    mark_running(db, [RunningJob(one.id, 1, "dead head")])
    cancel_batch(db, batch_id)
    first, second = pending_stops(db)

    other_attempt = PendingStop(second.id, 2, "m", second.reason, second.stop_at)
    assert settle_stops(db, [first, other_attempt]) == 1
    assert status(db, batch_id) is BatchStatus.CANCELLING
    assert settle_stops(db, [first, second]) == 1
    assert settle_stops(db, [first, second]) == 0
    assert settle_stops(db, []) == 0

    assert (status(db, batch_id), get_batch(db, batch_id).counts) == (BatchStatus.CANCELLED, Counts(cancelled=2))
    late = record_outcomes(db, [stopped(one, JobState.COMPLETED, "late")])
    assert late.fates == (Fate.DUPLICATE,)
    assert (get_job(db, one.id).text, get_job(db, one.id).duplicate_records) == (None, 1)


def test_only_a_stopped_job_can_be_settled(db: Database) -> None:
    submit(db, 1)
    (job,) = claim(db, 1)
    assert settle_stops(db, [PendingStop(job.id, 1, "m", StopReason.CANCELLED, START)]) == 0
    assert get_job(db, job.id).state is JobState.QUEUED


def test_a_stopped_job_whose_publication_failed_ends_instead_of_waiting_again(db: Database) -> None:
    batch_id = submit(db, 2)
    claimed = claim(db, 2)
    cancel_job(db, claimed[0].id)

    assert unclaim(db, claimed) == 2
    assert progress(db, batch_id).counts == Counts(waiting=1, cancelled=1)
    cancelled = get_job(db, claimed[0].id)
    assert (cancelled.error_type, cancelled.deliveries) == ("cancelled", 0)


def test_the_last_job_given_back_to_a_cancelled_batch_ends_it(db: Database) -> None:
    batch_id = submit(db, 1)
    claimed = claim(db, 1)
    cancel_batch(db, batch_id)
    assert unclaim(db, claimed) == 1
    assert status(db, batch_id) is BatchStatus.CANCELLED


def test_a_lost_job_that_is_to_stop_is_not_queued_again(db: Database, clock: Clock) -> None:
    submit(db, 2)
    stopping, lost = claim(db, 2)
    in_flight = queued_or_running(db, "m")
    cancel_job(db, stopping.id)
    assert reclaim(db, in_flight) == [lost]


def test_nothing_expires_before_its_time(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 2, expires_at=START + 10, deadlines={1: START + 9})
    clock.now += 8.9
    assert expire_due(db) == Stopped(0, 0)
    assert progress(db, batch_id).counts == Counts(waiting=2)


def test_a_batch_past_its_window_ends_as_expired_with_what_was_done(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 4, expires_at=START + 10)
    done, running, queued = claim(db, 3)
    mark_running(db, [RunningJob(running.id, 1, "h")])
    record_outcomes(db, [stopped(done, JobState.COMPLETED, "done")])
    clock.now += 10

    assert expire_due(db) == Stopped(1, 2)
    assert expire_due(db) == Stopped(0, 0)
    assert status(db, batch_id) is BatchStatus.IN_PROGRESS
    assert {stop.reason for stop in pending_stops(db)} == {StopReason.EXPIRED}

    clock.now += 1
    record_outcomes(db, [stopped(running, JobState.EXPIRED)])
    settle_stops(db, pending_stops(db))

    ended = get_batch(db, batch_id)
    assert (ended.status, ended.counts) == (BatchStatus.EXPIRED, Counts(completed=1, expired=3))
    assert (ended.expires_at, ended.expired_at, ended.completed_at) == (START + 10, START + 11, None)
    rows = list(iterate_results(db, batch_id, states=[JobState.EXPIRED]))
    assert [row.error_type for row in rows] == ["batch_expired"] * 3
    assert get_job(db, running.id).text == "partial"
    assert get_job(db, queued.id).text is None


def test_a_window_that_ends_after_the_last_job_expires_nothing(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 1, expires_at=START + 10)
    (job,) = claim(db, 1)
    clock.now += 11
    record_outcomes(db, [stopped(job, JobState.COMPLETED, "just in time")])

    assert expire_due(db) == Stopped(0, 0)
    assert status(db, batch_id) is BatchStatus.COMPLETED


def test_a_deadline_of_a_job_stops_that_job_alone(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 4, deadlines={1: START + 1, 2: START + 1, 3: START + 99})
    (flying,) = claim(db, 1)
    clock.now += 1

    assert expire_due(db) == Stopped(1, 1)
    assert expire_due(db) == Stopped(0, 0)
    record_outcomes(db, [stopped(flying, JobState.EXPIRED)])
    record_outcomes(db, [stopped(item, JobState.COMPLETED) for item in claim(db, 9)])

    ended = get_batch(db, batch_id)
    assert (ended.status, ended.counts) == (BatchStatus.COMPLETED, Counts(completed=2, expired=2))
    rows = list(iterate_results(db, batch_id, states=[JobState.EXPIRED]))
    assert [(row.line, row.error_type) for row in rows] == [(1, "deadline_exceeded"), (2, "deadline_exceeded")]
    assert rows[0].error_message == "the job's deadline passed before it had finished"


def test_of_two_deadlines_that_have_passed_the_earlier_one_is_told(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 3, expires_at=START + 10, deadlines={1: START + 9, 2: START + 11})
    clock.now += 60
    assert expire_due(db) == Stopped(3, 0)

    codes = [row.error_type for row in iterate_results(db, batch_id)]
    assert codes == ["deadline_exceeded", "batch_expired", "batch_expired"]
    assert status(db, batch_id) is BatchStatus.EXPIRED


def test_a_batch_whose_jobs_all_missed_their_own_deadline_has_not_expired(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 1, expires_at=START + 10, deadlines={1: START + 5})
    clock.now += 60
    expire_due(db)
    assert status(db, batch_id) is BatchStatus.COMPLETED


def test_a_job_does_not_expire_before_its_batch_is_published(db: Database, clock: Clock) -> None:
    submission = begin_submission(db, NewBatch("hash", expires_at=START + 1))
    add_jobs(db, submission, [NewJob(1, "id-1", "m", "u", REQUEST, START + 1)])
    clock.now += 5
    assert expire_due(db) == Stopped(0, 0)
    publish_batch(db, submission)
    assert expire_due(db) == Stopped(1, 0)


def test_the_first_reason_to_stop_stays(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 1, deadlines={1: START + 1})
    (job,) = claim(db, 1)
    clock.now += 1
    expire_due(db)
    clock.now += 1

    assert cancel_batch(db, batch_id) == Stopped(0, 1)
    assert [(stop.reason, stop.stop_at) for stop in pending_stops(db)] == [(StopReason.EXPIRED, START + 1)]
    record_outcomes(db, [stopped(job, JobState.EXPIRED)])
    assert status(db, batch_id) is BatchStatus.CANCELLED
    assert get_job(db, job.id).error_type == "deadline_exceeded"


def test_a_cancelling_batch_does_not_expire(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 2, expires_at=START + 5)
    (job,) = claim(db, 1)
    cancel_batch(db, batch_id)
    clock.now += 9

    assert expire_due(db) == Stopped(0, 0)
    record_outcomes(db, [stopped(job, JobState.CANCELLED)])
    assert status(db, batch_id) is BatchStatus.CANCELLED


def test_a_cancellation_beside_claims_and_records_leaves_no_job_open(url: str) -> None:
    with Database.open(url) as db:
        batch_id = submit(db, 400)

        def work(_: int) -> None:
            while claimed := claim(db, 7):
                if len(claimed) % 2:
                    mark_running(db, [RunningJob(item.id, 1, "h") for item in claimed])
                record_outcomes(db, [stopped(item, JobState.COMPLETED) for item in claimed[:4]])
                unclaim(db, claimed[4:])

        with ThreadPoolExecutor(4) as pool:
            workers = [pool.submit(work, number) for number in range(3)]
            time.sleep(0.05)
            pool.submit(cancel_batch, db, batch_id).result()
            for worker in workers:
                worker.result()
        settle_stops(db, pending_stops(db))

        counts = progress(db, batch_id).counts
        assert (status(db, batch_id), counts.num_open, counts.total) == (BatchStatus.CANCELLED, 0, 400)
        assert counts.cancelled > 0
