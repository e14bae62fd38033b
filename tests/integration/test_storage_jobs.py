"""A job's way through the database: claimed, live, ended once, read back; on both kinds of database."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from storage.batch_records import Counts, NewBatch
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database
from storage.errors import JobNotFound
from storage.figures import batch_figures
from storage.job_records import ClaimedJob, Fate, NewJob, OutcomeRow, Recorded, RunningJob, Window
from storage.jobs import (
    claim_waiting,
    get_job,
    iterate_results,
    mark_running,
    progress,
    queued_or_running,
    reclaim,
    unclaim,
    window,
)
from storage.outcomes import record_outcomes, unknown_records
from storage.retries import RetryChoice, retry_batch
from storage.states import BatchStatus, JobState
from storage.stops import expire_due, pending_stops, settle_stops
from tests.integration.storage_databases import START, Clock

pytest_plugins = ["tests.integration.storage_databases"]

REQUEST = '{"prompt":"é"}'
ALL = {"max_jobs": 10_000, "max_bytes": 10**9}


def submit(db: Database, count: int, *, models: tuple[str, ...] = ("m",), priority: int = 5) -> str:
    submission = begin_submission(db, NewBatch("hash", priority=priority))
    jobs = [
        NewJob(line, f"id-{line}", models[line % len(models)], "/v1/completions", REQUEST)
        for line in range(1, count + 1)
    ]
    add_jobs(db, submission, jobs)
    return publish_batch(db, submission).id


def lines(jobs: list[ClaimedJob]) -> list[int]:
    return [int(job.id.rpartition("-")[2]) for job in jobs]


def outcome(job: ClaimedJob, **changes: Any) -> OutcomeRow:
    values: dict[str, Any] = {
        "job": job.id,
        "attempt": job.attempt,
        "head": "h",
        "state": JobState.COMPLETED,
        "text": "hello",
        "token_ids": (1, 2, 3, 4),
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "started_at": START + 2,
        "finished_at": START + 4,
        "ttft_s": 0.5,
        "decode_tps": 2.5,
        "rounds": 2,
        "tokens_per_round": 1.5,
        "drafted": 8,
        "accepted": 2,
        "cached_tokens": 3,
        "wire_bytes_up": 2**40,
        "wire_bytes_down": 70,
        "draft_s": 0.1,
        "head_s": 0.2,
        "link_s": 0.3,
        "tail_s": 0.4,
        "wire_dtype": "int8",
    }
    return OutcomeRow(**{**values, **changes})


def test_jobs_are_claimed_by_priority_and_in_turn_between_batches(db: Database, clock: Clock) -> None:
    first = submit(db, 3)
    clock.now += 1
    second = submit(db, 2)
    clock.now += 1
    unimportant = submit(db, 1, priority=9)
    clock.now += 1
    urgent = submit(db, 1, priority=0)

    claimed = claim_waiting(db, "m", **ALL)

    assert [job.batch_id for job in claimed] == [urgent, first, second, first, second, first, unimportant]
    assert lines(claimed) == [1, 1, 1, 2, 2, 3, 1]
    assert [job.priority for job in claimed] == [0, 5, 5, 5, 5, 5, 9]
    assert claim_waiting(db, "m", **ALL) == []


def test_batches_of_one_priority_get_equal_shares_however_large_they_are(db: Database, clock: Clock) -> None:
    large, small, tiny = submit(db, 500), submit(db, 40), submit(db, 3)

    shares = Counter(job.batch_id for job in claim_waiting(db, "m", max_jobs=60, max_bytes=10**6))
    assert shares == {large: 29, small: 28, tiny: 3} or shares == {large: 28, small: 29, tiny: 3}


def test_a_batch_that_comes_later_catches_up_one_claim_at_a_time(db: Database, clock: Clock) -> None:
    first = submit(db, 9)
    claim_waiting(db, "m", max_jobs=2, max_bytes=10**6)
    clock.now += 1
    second = submit(db, 9)

    order = [claim_waiting(db, "m", max_jobs=1, max_bytes=10**6)[0].batch_id for _ in range(6)]
    assert order == [second, second, first, second, first, second]


def test_a_strictly_higher_priority_is_served_first(db: Database) -> None:
    submit(db, 5, priority=5)
    urgent = submit(db, 5, priority=4)

    assert {job.batch_id for job in claim_waiting(db, "m", max_jobs=5, max_bytes=10**6)} == {urgent}


@pytest.mark.parametrize("priority", [-1, 10])
def test_a_priority_outside_0_to_9_is_refused(priority: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 9"):
        NewBatch("hash", priority=priority)


def test_a_claim_takes_only_its_model_and_carries_what_publication_needs(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 4, models=("a", "b"))

    assert claim_waiting(db, "c", **ALL) == []
    claimed = claim_waiting(db, "a", **ALL)
    assert claimed[0] == ClaimedJob(f"{batch_id}-2", 1, batch_id, "id-2", "a", 5, REQUEST, 15)
    assert lines(claimed) == [2, 4]
    stored = get_job(db, claimed[0].id)
    assert (stored.state, stored.deliveries, stored.queued_at) == (JobState.QUEUED, 1, clock.now)


def test_a_claim_keeps_within_its_number_of_jobs_and_bytes(db: Database) -> None:
    submit(db, 12)

    assert lines(claim_waiting(db, "m", max_jobs=2, max_bytes=10**6)) == [1, 2]
    assert lines(claim_waiting(db, "m", max_jobs=9, max_bytes=45)) == [3, 4, 5]
    assert lines(claim_waiting(db, "m", max_jobs=9, max_bytes=44)) == [6, 7]
    assert claim_waiting(db, "m", max_jobs=9, max_bytes=0) == []
    assert claim_waiting(db, "m", max_jobs=0, max_bytes=9) == []


def test_a_job_larger_than_the_room_is_taken_alone(db: Database) -> None:
    submit(db, 3)
    assert lines(claim_waiting(db, "m", max_jobs=9, max_bytes=1)) == [1]


def test_what_is_in_flight_is_counted_in_jobs_and_bytes(db: Database) -> None:
    submit(db, 3)
    claimed = claim_waiting(db, "m", max_jobs=2, max_bytes=10**6)
    mark_running(db, [RunningJob(claimed[0].id, 1, "h")])

    assert window(db, "m") == Window(2, 30)
    assert window(db, "other") == Window(0, 0)


def test_a_claim_that_could_not_be_published_is_given_back(db: Database) -> None:
    submit(db, 3)
    claimed = claim_waiting(db, "m", **ALL)
    mark_running(db, [RunningJob(claimed[2].id, 1, "h")])

    assert unclaim(db, claimed) == 2
    assert get_job(db, claimed[0].id).deliveries == 0
    assert lines(claim_waiting(db, "m", **ALL)) == [1, 2]


def test_a_live_attempt_is_marked_running_once(db: Database) -> None:
    submit(db, 2)
    claimed = claim_waiting(db, "m", **ALL)
    live = [RunningJob(job.id, 1, "h") for job in claimed]

    assert mark_running(db, live) == 2
    assert mark_running(db, live) == 0
    assert mark_running(db, [RunningJob(claimed[0].id, 1, "other head")]) == 1
    assert mark_running(db, [RunningJob(claimed[0].id, 2, "h"), RunningJob("nothing-1", 1, "h")]) == 0
    assert (get_job(db, claimed[0].id).state, get_job(db, claimed[0].id).head) == (
        JobState.RUNNING,
        "other head",
    )


def test_running_never_undoes_an_end(db: Database) -> None:
    batch_id = submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    record_outcomes(db, [outcome(job)])

    assert mark_running(db, [RunningJob(job.id, 1, "late")]) == 0
    assert progress(db, batch_id).counts == Counts(completed=1)


def test_a_recorded_outcome_comes_back_with_every_figure(db: Database, clock: Clock) -> None:
    submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    clock.now += 5
    sent = outcome(job)
    record_outcomes(db, [sent])

    stored = get_job(db, job.id)
    for name in (field.name for field in dataclasses.fields(OutcomeRow) if field.name != "job"):
        assert getattr(stored, name) == getattr(sent, name), name
    assert (stored.completion_tokens, stored.e2e_tps, stored.acceptance) == (4, 2.0, 0.25)
    assert (stored.queue_s, stored.recorded_at) == (2.0, START + 5)
    assert (stored.batch_id, stored.line, stored.custom_id) == (job.batch_id, 1, "id-1")


def test_a_failure_without_figures_is_recorded(db: Database) -> None:
    batch_id = submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    failure = OutcomeRow(job.id, 1, "h", JobState.FAILED, error_type="internal_error", error_message="no\0 luck")
    record_outcomes(db, [failure])

    stored = get_job(db, job.id)
    assert (stored.state, stored.error_type, stored.error_message) == (
        JobState.FAILED,
        "internal_error",
        "no\0 luck",
    )
    assert (stored.e2e_tps, stored.acceptance, stored.queue_s, stored.token_ids) == (None, None, None, ())
    assert get_batch(db, batch_id).status is BatchStatus.COMPLETED


@pytest.mark.parametrize("written", ["", "a\0b", "\\json:x", "\ud800", "é 🦊\r\n", '"\\'])
def test_any_text_comes_back_exactly(db: Database, written: str) -> None:
    submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    record_outcomes(db, [outcome(job, text=written)])

    assert get_job(db, job.id).text == written


def test_a_head_whose_clock_is_behind_gives_no_negative_queue_time(db: Database) -> None:
    submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    record_outcomes(db, [outcome(job, started_at=START - 60, finished_at=START - 60)])

    assert (get_job(db, job.id).queue_s, get_job(db, job.id).e2e_tps) == (0.0, None)


def test_the_first_end_of_an_attempt_wins_and_the_rest_is_counted(db: Database) -> None:
    submit(db, 2)
    one, two = claim_waiting(db, "m", **ALL)
    first = [outcome(one, text="first"), outcome(one, text="second"), outcome(two, attempt=2)]
    assert record_outcomes(db, first) == Recorded((Fate.APPLIED, Fate.DUPLICATE, Fate.UNKNOWN), ("m", "m", "m"), ())

    late = [
        outcome(one, text="third", finished_at=START - 99),
        outcome(one, state=JobState.FAILED),
        OutcomeRow("nothing-1", 1, "h", JobState.FAILED),
    ]
    assert record_outcomes(db, late) == Recorded((Fate.DUPLICATE, Fate.DUPLICATE, Fate.UNKNOWN), ("m", "m", None), ())

    assert (get_job(db, one.id).text, get_job(db, one.id).duplicate_records) == ("first", 3)
    assert (get_job(db, two.id).state, get_job(db, two.id).stale_records) == (JobState.QUEUED, 0)
    assert unknown_records(db) == 2
    assert record_outcomes(db, []) == Recorded((), (), ())


def test_an_outcome_of_an_attempt_before_a_retry_is_counted_and_one_of_an_attempt_to_come_is_unknown(
    db: Database,
) -> None:
    batch_id = submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    record_outcomes(db, [outcome(job, state=JobState.FAILED)])
    assert retry_batch(db, batch_id, RetryChoice.of(JobState.FAILED)) == 1
    early, late = outcome(job), outcome(job, attempt=3)
    assert record_outcomes(db, [early, late]) == Recorded((Fate.STALE, Fate.UNKNOWN), ("m", "m"), ())
    assert (get_job(db, job.id).state, get_job(db, job.id).stale_records) == (JobState.WAITING, 1)


def test_an_outcome_of_a_job_whose_claim_was_given_back_still_counts(db: Database) -> None:
    submit(db, 1)
    claimed = claim_waiting(db, "m", **ALL)
    unclaim(db, claimed)

    assert record_outcomes(db, [outcome(claimed[0])]).fates == (Fate.APPLIED,)
    assert claim_waiting(db, "m", **ALL) == []


def test_an_outcome_that_is_no_end_is_refused(db: Database) -> None:
    submit(db, 1)
    (job,) = claim_waiting(db, "m", **ALL)
    with pytest.raises(ValueError, match="running is no end"):
        record_outcomes(db, [outcome(job, state=JobState.RUNNING)])
    assert get_job(db, job.id).state is JobState.QUEUED


def test_a_batch_completes_with_its_last_job(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 3)
    clock.now += 1
    other = submit(db, 1)
    one, only, two, three = claim_waiting(db, "m", **ALL)

    assert record_outcomes(db, [outcome(one), outcome(two, state=JobState.FAILED)]).ended_batches == ()
    assert get_batch(db, batch_id).status is BatchStatus.IN_PROGRESS
    clock.now += 6
    recorded = record_outcomes(db, [outcome(three), outcome(only)])

    assert set(recorded.ended_batches) == {batch_id, other}
    ended = get_batch(db, batch_id)
    assert (ended.status, ended.counts) == (BatchStatus.COMPLETED, Counts(completed=2, failed=1))
    assert ended.finalizing_at == ended.completed_at == START + 7
    assert record_outcomes(db, [outcome(three)]).ended_batches == ()


def test_lost_jobs_are_claimed_again_under_the_same_attempt(db: Database, clock: Clock) -> None:
    submit(db, 3)
    one, two, three = claim_waiting(db, "m", **ALL)
    mark_running(db, [RunningJob(two.id, 1, "h")])
    in_flight = queued_or_running(db, "m")
    assert [(job.id, job.state, job.head) for job in in_flight] == [
        (one.id, JobState.QUEUED, None),
        (two.id, JobState.RUNNING, "h"),
        (three.id, JobState.QUEUED, None),
    ]
    record_outcomes(db, [outcome(three)])
    clock.now += 60

    assert reclaim(db, in_flight) == [one, two]
    assert reclaim(db, in_flight) == []
    assert reclaim(db, []) == []

    again = get_job(db, two.id)
    assert (again.state, again.attempt, again.deliveries) == (JobState.QUEUED, 1, 2)
    assert (again.queued_at, again.claimed_at) == (START, START + 60)


def test_results_stream_in_input_order_whatever_the_order_of_ends(db: Database) -> None:
    batch_id = submit(db, 450)
    claimed = claim_waiting(db, "m", **ALL)
    record_outcomes(db, [outcome(job, text=job.custom_id) for job in reversed(claimed[:448])])
    record_outcomes(db, [outcome(claimed[448], state=JobState.FAILED)])

    results = list(iterate_results(db, batch_id))
    assert [job.line for job in results] == list(range(1, 451))
    assert all(job.text == job.custom_id for job in results[:448])
    ended = iterate_results(db, batch_id, states=[JobState.COMPLETED, JobState.FAILED], after_line=440)
    assert [job.line for job in ended] == list(range(441, 450))


def test_an_unknown_job_is_an_error(db: Database) -> None:
    with pytest.raises(JobNotFound):
        get_job(db, "nothing")


def test_progress_counts_jobs_and_tokens(db: Database) -> None:
    batch_id = submit(db, 4)
    claimed = claim_waiting(db, "m", max_jobs=3, max_bytes=10**6)
    mark_running(db, [RunningJob(job.id, 1, "h") for job in claimed[:2]])
    record_outcomes(db, [outcome(claimed[0])])

    now = progress(db, batch_id)
    assert now.counts == Counts(waiting=1, queued=1, running=1, completed=1)
    assert (now.counts.total, now.counts.num_open, now.counts.num_ended) == (4, 3, 1)
    assert (now.status, now.completion_tokens) == (BatchStatus.IN_PROGRESS, 4)


def test_the_figures_of_a_batch_are_weighted_sums_of_its_jobs(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 4)
    one, two, three, four = claim_waiting(db, "m", **ALL)
    clock.now += 10
    record_outcomes(
        db,
        [
            outcome(one, decode_tps=1.0, rounds=1, tokens_per_round=4.0, drafted=4, accepted=3),
            outcome(two, decode_tps=2.0, rounds=3, tokens_per_round=1.0, drafted=12, accepted=0),
            outcome(three, decode_tps=9.0, rounds=0, tokens_per_round=None, drafted=0, accepted=0),
            OutcomeRow(four.id, 1, "h", JobState.FAILED, error_type="x", error_message="y"),
        ],
    )
    clock.now += 100

    figures = batch_figures(db, batch_id)
    assert (figures.wall_s, figures.completion_tokens, figures.batch_tps) == (10.0, 12, 1.2)
    assert (figures.mean_decode_tps, figures.median_decode_tps) == (4.0, 2.0)
    assert (figures.rounds, figures.tokens_per_round) == (4, 7 / 4)
    assert (figures.drafted, figures.accepted, figures.acceptance) == (16, 3, 3 / 16)
    assert (figures.prompt_tokens, figures.cached_tokens) == (27, 9)
    assert (figures.wire_bytes_up, figures.wire_bytes_down) == (3 * 2**40, 210)
    assert figures.draft_s == pytest.approx(0.3)
    assert (figures.mean_ttft_s, figures.mean_e2e_tps, figures.queue_s) == (0.5, 2.0, 6.0)
    assert figures.counts == Counts(completed=3, failed=1)


def test_the_median_of_an_even_number_lies_between_the_middle_two(db: Database) -> None:
    batch_id = submit(db, 4)
    claimed = claim_waiting(db, "m", **ALL)
    speeds = [1.0, 2.0, 4.0, 50.0]
    record_outcomes(db, [outcome(job, decode_tps=tps) for job, tps in zip(claimed, speeds, strict=True)])

    assert batch_figures(db, batch_id).median_decode_tps == 3.0


def test_a_batch_that_has_measured_nothing_has_no_rates(db: Database, clock: Clock) -> None:
    batch_id = submit(db, 1)
    clock.now += 2

    figures = batch_figures(db, batch_id)
    assert (figures.wall_s, figures.completion_tokens, figures.batch_tps) == (2.0, 0, 0.0)
    assert (figures.tokens_per_round, figures.acceptance, figures.median_decode_tps) == (None, None, None)


def _claim_all(url: str, ends: bool) -> list[str]:
    ids: list[str] = []
    with Database.open(url) as db:
        while claimed := claim_waiting(db, "m", max_jobs=7, max_bytes=10**6):
            ids += [job.id for job in claimed]
            if ends:
                record_outcomes(db, [OutcomeRow(job.id, 1, "h", JobState.COMPLETED) for job in claimed])
    return ids


def test_two_processes_never_claim_the_same_job_and_lose_no_end(url: str) -> None:
    with Database.open(url) as db:
        batches = [submit(db, 150), submit(db, 150)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        claims = list(pool.map(_claim_all, [url] * 2, [True] * 2))

    ids = [job_id for claim in claims for job_id in claim]
    assert len(ids) == len(set(ids)) == 300
    with Database.open(url) as db:
        assert [get_batch(db, batch_id).status for batch_id in batches] == [BatchStatus.COMPLETED] * 2


def test_threads_that_share_a_database_never_claim_the_same_job(url: str) -> None:
    with Database.open(url) as db:
        submit(db, 200)

        def claim(_: int) -> list[str]:
            ids: list[str] = []
            while claimed := claim_waiting(db, "m", max_jobs=5, max_bytes=10**6):
                ids += [job.id for job in claimed]
            return ids

        with ThreadPoolExecutor(4) as pool:
            ids = [job_id for claim_ids in pool.map(claim, range(4)) for job_id in claim_ids]
    assert len(ids) == len(set(ids)) == 200


def test_the_same_outcomes_from_two_threads_are_applied_once(url: str) -> None:
    with Database.open(url) as db:
        batch_id = submit(db, 100)
        claimed = claim_waiting(db, "m", **ALL)
        outcomes = [outcome(job) for job in claimed]
        orders = [outcomes, outcomes[::-1], outcomes]

        with ThreadPoolExecutor(3) as pool:
            recorded = list(pool.map(lambda order: record_outcomes(db, order), orders))

        assert sum(item.count(Fate.APPLIED) for item in recorded) == 100
        assert sum(item.count(Fate.DUPLICATE) for item in recorded) == 200
        assert sum(len(item.ended_batches) for item in recorded) == 1
        assert get_batch(db, batch_id).counts == Counts(completed=100)


def test_the_hot_queries_use_their_indexes(url: str) -> None:
    if not url.startswith("sqlite"):
        pytest.skip("PostgreSQL plans by table statistics")
    plans = {
        "SELECT id FROM job WHERE batch_id='b' AND model='m' AND state = 'waiting' ORDER BY line": "job_waiting",
        "SELECT id FROM job WHERE model='m' AND state IN ('queued', 'running')": "job_in_flight",
        "SELECT state, count(*), sum(completion_tokens) FROM job WHERE batch_id='b' GROUP BY state": (
            "COVERING INDEX job_by_state"
        ),
    }
    with Database.open(url) as db, db.read() as connection:
        for query, index in plans.items():
            plan = connection.execute(text(f"EXPLAIN QUERY PLAN {query}")).all()
            assert index in plan[0].detail
            assert len(plan) == 1


def _plans(db: Database, act: Callable[[Database], object]) -> list[str]:
    """The steps by which SQLite carries out every statement that `act` sends."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        statements.append((statement, parameters[0] if many else parameters))

    with db.read() as connection:
        engine = connection.engine
    event.listen(engine, "before_cursor_execute", note)
    act(db)
    event.remove(engine, "before_cursor_execute", note)
    with db.read() as connection:
        return [
            row.detail
            for statement, parameters in statements
            if statement.startswith(("SELECT", "UPDATE", "DELETE"))
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


@pytest.mark.parametrize(
    "act",
    [
        lambda db: claim_waiting(db, "m", max_jobs=5, max_bytes=10**6),
        expire_due,
        pending_stops,
        lambda db: settle_stops(db, pending_stops(db)),
        lambda db: reclaim(db, queued_or_running(db, "m")),
        lambda db: window(db, "m"),
    ],
    ids=["claim_waiting", "expire_due", "pending_stops", "settle_stops", "reclaim", "window"],
)
def test_no_statement_of_the_bookkeeper_scans_the_jobs(tmp_path: Path, act: Callable[[Database], object]) -> None:
    clock = Clock()
    with Database.open(f"sqlite:///{tmp_path}/x.sqlite3", clock=clock) as db:
        due = begin_submission(db, NewBatch("hash", expires_at=START + 1))
        add_jobs(db, due, [NewJob(n, f"id-{n}", "m", "u", REQUEST, expires_at=START + n) for n in range(1, 30)])
        publish_batch(db, due)
        submit(db, 20)
        claim_waiting(db, "m", max_jobs=10, max_bytes=10**6)
        clock.now += 9
        if act is not expire_due:
            expire_due(db)

        steps = _plans(db, act)
        assert steps
        # An index that holds nothing but jobs to stop may be read whole.
        assert not [step for step in steps if step.startswith("SCAN job") and "job_stopping" not in step]
