"""Taking over stored results instead of generating them again, on both kinds of database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from sqlalchemy import Connection

from storage import reuse as reuse_module
from storage.batch_records import BatchRow, Counts, NewBatch, Submission
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database
from storage.errors import SubmissionSuperseded
from storage.figures import batch_figures
from storage.filters import JobFilter
from storage.job_records import ClaimedJob, NewJob, OutcomeRow
from storage.jobs import claim_waiting, get_job, iterate_results, progress
from storage.outcomes import record_outcomes
from storage.queries import find_jobs
from storage.retention import delete_batch
from storage.reuse import reuse_results
from storage.served_models import upsert_model
from storage.states import BatchStatus, JobState
from storage.stops import cancel_batch
from tests.integration.storage_databases import START, Clock

pytest_plugins = ["tests.integration.storage_databases"]

PROFILE = {"fingerprint": "f00d", "dtype": "float32"}


@pytest.fixture(autouse=True)
def _served(db: Database) -> None:
    upsert_model(db, "m", PROFILE)


def request(prompt: str, **changes: object) -> str:
    return json.dumps({"prompt": prompt, "seed": 1, "temperature": 0.0, "stop": [], **changes})


def write(db: Database, *requests: str, model: str = "m") -> Submission:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, [NewJob(n, f"id-{n}", model, "u", text) for n, text in enumerate(requests, start=1)])
    return submission


def submit(db: Database, *requests: str, reuse: bool = False, model: str = "m") -> BatchRow:
    submission = write(db, *requests, model=model)
    if reuse:
        reuse_results(db, submission)
    return publish_batch(db, submission)


def run(db: Database, state: JobState = JobState.COMPLETED, model: str = "m") -> list[ClaimedJob]:
    """End all that waits."""
    claimed = claim_waiting(db, model, max_jobs=9_999, max_bytes=10**9)
    outcomes = [
        OutcomeRow(item.id, 1, "h", state, f"text of {item.custom_id}", (1, 2, 3), "stop", prompt_tokens=7, rounds=2)
        for item in claimed
    ]
    record_outcomes(db, outcomes)
    return claimed


def test_a_stored_result_is_taken_over_and_says_from_where(db: Database, clock: Clock) -> None:
    submit(db, request("a"))
    (source,) = run(db)
    clock.now += 60

    batch = submit(db, request("b"), request("a"), reuse=True)

    assert batch.counts == Counts(waiting=1, completed=1)
    copy = get_job(db, f"{batch.id}-2")
    assert (copy.state, copy.reused_from) == (JobState.COMPLETED, source.id)
    assert (copy.text, copy.token_ids, copy.finish_reason) == ("text of id-1", (1, 2, 3), "stop")
    assert (copy.prompt_tokens, copy.completion_tokens, copy.recorded_at) == (7, 3, START + 60)
    assert (copy.head, copy.rounds, copy.started_at, copy.deliveries) == (None, None, None, 0)
    assert [item.custom_id for item in run(db)] == ["id-1"]
    assert get_batch(db, batch.id).status is BatchStatus.COMPLETED


def test_a_batch_whose_results_are_all_stored_ends_with_its_publication(db: Database, clock: Clock) -> None:
    submit(db, request("a"), request("b"))
    run(db)
    clock.now += 5

    batch = submit(db, request("b"), request("a"), request("a"), reuse=True)

    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, Counts(completed=3))
    assert batch.in_progress_at == batch.completed_at == START + 5
    assert [job.text for job in iterate_results(db, batch.id)] == ["text of id-2", "text of id-1", "text of id-1"]


def test_nothing_is_reused_unless_asked_for(db: Database) -> None:
    submit(db, request("a"))
    run(db)
    assert submit(db, request("a")).counts == Counts(waiting=1)


def test_the_seed_of_a_greedy_request_does_not_matter(db: Database) -> None:
    submit(db, request("a", seed=1), request("b", seed=1, temperature=1e-6))
    run(db)
    batch = submit(db, request("a", seed=2), request("b", seed=2, temperature=1e-6), reuse=True)
    assert batch.counts == Counts(completed=2)


@pytest.mark.parametrize(
    "other",
    [
        request("a", seed=2, temperature=0.7),
        request("a", temperature=0.8),
        request("a", temperature=0.7, stop=["x"]),
        request("A", temperature=0.7),
    ],
)
def test_a_sampled_result_is_reused_only_for_the_same_request_and_seed(db: Database, other: str) -> None:
    submit(db, request("a", temperature=0.7))
    run(db)

    assert submit(db, other, reuse=True).counts == Counts(waiting=1)
    assert submit(db, request("a", temperature=0.7), reuse=True).counts == Counts(completed=1)


def test_the_order_of_a_requests_fields_does_not_matter(db: Database) -> None:
    submit(db, '{"prompt": "é", "temperature": 0, "seed": 3}')
    run(db)
    assert submit(db, '{"seed":4,"temperature":0,"prompt":"\\u00e9"}', reuse=True).counts == Counts(completed=1)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED])
def test_only_completed_results_are_reused(db: Database, state: JobState) -> None:
    submit(db, request("a"))
    run(db, state)
    assert submit(db, request("a"), reuse=True).counts == Counts(waiting=1)


def test_a_result_of_another_profile_is_not_reused(db: Database) -> None:
    submit(db, request("a"))
    run(db)
    upsert_model(db, "m", {**PROFILE, "dtype": "float16"})
    assert submit(db, request("a"), reuse=True).counts == Counts(waiting=1)

    upsert_model(db, "m", dict(reversed(PROFILE.items())))
    assert submit(db, request("a"), reuse=True).counts == Counts(completed=1)


def test_a_result_of_another_served_name_is_not_reused(db: Database) -> None:
    upsert_model(db, "other", PROFILE)
    submit(db, request("a"))
    run(db)
    assert submit(db, request("a"), model="other", reuse=True).counts == Counts(waiting=1)


def test_without_a_profile_nothing_is_reused(db: Database) -> None:
    submit(db, request("a"), model="unknown")
    run(db, model="unknown")
    upsert_model(db, "unknown", PROFILE)
    assert submit(db, request("a"), model="unknown", reuse=True).counts == Counts(waiting=1)


def test_a_reused_result_names_the_job_that_ran(db: Database) -> None:
    submit(db, request("a"))
    (source,) = run(db)
    copies = [submit(db, request("a"), reuse=True) for _ in range(3)]
    assert {get_job(db, f"{batch.id}-1").reused_from for batch in copies} == {source.id}


def test_a_copy_stays_when_its_source_is_deleted(db: Database) -> None:
    first = submit(db, request("a"))
    (source,) = run(db)
    copy = submit(db, request("a"), reuse=True)
    delete_batch(db, first.id)

    assert get_job(db, f"{copy.id}-1").text == "text of id-1"
    assert get_job(db, f"{copy.id}-1").reused_from == source.id
    assert submit(db, request("a"), reuse=True).counts == Counts(waiting=1)


def test_reused_results_count_in_no_figure_of_speed(db: Database, clock: Clock) -> None:
    submit(db, request("a"))
    run(db)
    batch = submit(db, request("a"), request("b"), reuse=True)
    clock.now += 3
    run(db)

    figures = batch_figures(db, batch.id)
    assert (figures.reused, figures.completion_tokens, figures.prompt_tokens) == (1, 3, 7)
    assert (figures.rounds, figures.batch_tps) == (2, 1.0)
    assert progress(db, batch.id).completion_tokens == 3


def test_results_are_reused_only_before_publication(db: Database) -> None:
    submission = write(db, request("a"))
    publish_batch(db, submission)
    with pytest.raises(SubmissionSuperseded):
        reuse_results(db, submission)


def test_many_jobs_are_looked_up_page_by_page(db: Database) -> None:
    submit(db, request("a"))
    run(db)
    submission = begin_submission(db, NewBatch("hash"))
    texts = [request("a" if n % 3 == 0 else f"own {n}") for n in range(1, 2501)]
    add_jobs(db, submission, [NewJob(n, f"id-{n}", "m", "u", text) for n, text in enumerate(texts, start=1)])

    assert reuse_results(db, submission) == 833
    assert publish_batch(db, submission).counts == Counts(waiting=1667, completed=833)


def steps_of(db: Database, act: Callable[[], object]) -> int:
    """How many steps SQLite's machine takes for it, in tens."""
    with db.read() as connection:
        driver = connection.connection.driver_connection
    assert driver is not None
    ticks = count(1)
    # Anything but 0 would interrupt.
    driver.set_progress_handler(lambda: next(ticks) * 0, 10)
    act()
    driver.set_progress_handler(None, 0)
    return next(ticks)


def test_equal_requests_read_their_stored_twins_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    if db.sqlite_file is None:
        pytest.skip("PostgreSQL does not count its steps")
    monkeypatch.setattr(reuse_module, "_PAGE", 10)
    submit(db, *[request("a")] * 1000)
    run(db)
    few, many = write(db, *[request("a")] * 10), write(db, *[request("a")] * 40)

    steps = steps_of(db, lambda: reuse_results(db, few))

    assert steps_of(db, lambda: reuse_results(db, many)) < 2 * steps
    assert publish_batch(db, many).counts == Counts(completed=40)


def test_what_is_remembered_is_bounded(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_module, "_PAGE", 2)
    monkeypatch.setattr(reuse_module, "_MAX_REMEMBERED", 2)
    submit(db, *map(request, "abcdef"))
    run(db)
    batch = submit(db, *map(request, "abcdefaxbxcx"), reuse=True)
    assert batch.counts == Counts(waiting=3, completed=9)


def before_write(db: Database, number: int, act: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Do something when the database is about to begin its write transaction of this number, from now."""
    numbers, write_as_before = count(1), db.write

    @contextmanager
    def write() -> Iterator[Connection]:
        if next(numbers) == number:
            act()
        with write_as_before() as connection:
            yield connection

    patch.setattr(db, "write", write)


#: the write transaction of the second page: the first looks for profiles
SECOND_PAGE = 3


def test_a_result_deleted_between_two_pages_is_replaced_by_the_next_oldest(
    db: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = submit(db, request("a"))
    (first,) = run(db)
    clock.now += 60
    submit(db, request("a"))
    (second,) = run(db)
    submission = write(db, *[request("a")] * 5)
    monkeypatch.setattr(reuse_module, "_PAGE", 2)
    before_write(db, SECOND_PAGE, lambda: delete_batch(db, oldest.id), monkeypatch)

    assert reuse_results(db, submission) == 5

    batch = publish_batch(db, submission)
    assert [job.reused_from for job in iterate_results(db, batch.id)] == [first.id] * 2 + [second.id] * 3


def test_a_batch_cancelled_between_two_pages_takes_nothing_more(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(db, request("a"))
    run(db)
    submission = write(db, *[request("a")] * 5)
    batch_id = submission.batch.id
    monkeypatch.setattr(reuse_module, "_PAGE", 2)
    before_write(db, SECOND_PAGE, lambda: cancel_batch(db, batch_id), monkeypatch)

    with pytest.raises(SubmissionSuperseded):
        reuse_results(db, submission)

    batch = get_batch(db, batch_id)
    assert (batch.status, batch.counts) == (BatchStatus.CANCELLED, Counts(completed=2, cancelled=3))


def test_what_was_taken_over_is_found_once_its_batch_is_published(db: Database, clock: Clock) -> None:
    submit(db, request("a"))
    (source,) = run(db)
    clock.now += 60
    submission = write(db, request("a"))
    reuse_results(db, submission)
    assert [job.id for job in find_jobs(db, JobFilter())] == [source.id]

    batch = publish_batch(db, submission)
    assert [job.id for job in find_jobs(db, JobFilter())] == [source.id, f"{batch.id}-1"]
