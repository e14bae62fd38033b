"""Several completions of a job and their log probabilities in the database, also in one of the version before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from storage.batch_records import Counts, NewBatch
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database, parse_url
from storage.figures import batch_figures
from storage.job_records import ChoiceRow, NewJob, OutcomeRow
from storage.jobs import claim_waiting, get_job, iterate_results, progress
from storage.outcomes import record_outcomes
from storage.retries import RetryChoice, retry_batch
from storage.reuse import reuse_results
from storage.served_models import upsert_model
from storage.states import JobState
from tasks.openai_batch import Defaults, ParsedJob, parse_line

pytest_plugins = ["tests.integration.storage_databases"]

VERSION_3 = Path(__file__).with_name("storage_version_3.sql")
START = 1_700_000_000.0
PROFILE = {"fingerprint": "f00d", "dtype": "float32"}
CHOICES = (ChoiceRow("a\0\ud800", (4, 5), "length"), ChoiceRow("", (), "stop"))
LOGPROBS = json.dumps([{"known": [], "counts": [], "places": [], "logprobs": []}] * 3)


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    with Database.open(url, clock=lambda: START) as database:
        upsert_model(database, "m", PROFILE)
        yield database


def job_of(line: bytes) -> NewJob:
    parsed = parse_line(1, line, Defaults(), seeds=lambda: 7)
    assert isinstance(parsed, ParsedJob)
    return parsed.new_job("m", START)


def submit(db: Database, *jobs: NewJob, reuse: bool = False) -> str:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, list(jobs))
    if reuse:
        reuse_results(db, submission)
    return publish_batch(db, submission).id


def record(db: Database, job_id: str, state: JobState = JobState.COMPLETED) -> None:
    claim_waiting(db, "m", max_jobs=9, max_bytes=10**6)
    end = OutcomeRow(job_id, 1, "h", state, "first", (1, 2, 3), "stop", choices=CHOICES, logprobs=LOGPROBS)
    record_outcomes(db, [end])


SEVERAL = b'{"prompt": "p", "n": 3, "logprobs": 0}'


def test_choices_and_logprobs_come_back_and_all_tokens_count(db: Database) -> None:
    batch = submit(db, job_of(SEVERAL))
    record(db, f"{batch}-1")
    (row,) = iterate_results(db, batch, logprobs=True)
    assert (row.text, row.choices, row.num_choices, row.logprobs) == ("first", CHOICES, 3, LOGPROBS)
    assert row.completion_tokens == 5
    assert progress(db, batch).completion_tokens == batch_figures(db, batch).completion_tokens == 5


def test_logprobs_are_read_only_for_those_who_ask(db: Database) -> None:
    batch = submit(db, job_of(SEVERAL))
    record(db, f"{batch}-1")
    (row,) = iterate_results(db, batch)
    assert row.logprobs is None
    assert get_job(db, f"{batch}-1") == row


def test_a_job_of_one_choice_has_no_others(db: Database) -> None:
    batch = submit(db, job_of(b'{"prompt": "p"}'))
    claim_waiting(db, "m", max_jobs=9, max_bytes=10**6)
    record_outcomes(db, [OutcomeRow(f"{batch}-1", 1, "h", JobState.COMPLETED, "x", (1,), "stop")])
    (row,) = iterate_results(db, batch, logprobs=True)
    assert (row.choices, row.num_choices, row.logprobs, row.completion_tokens) == ((), 1, None, 1)


def test_a_reused_result_has_all_choices_and_logprobs(db: Database) -> None:
    source = submit(db, job_of(SEVERAL))
    record(db, f"{source}-1")
    batch = submit(db, job_of(SEVERAL), reuse=True)
    (row,) = iterate_results(db, batch, logprobs=True)
    assert (row.reused_from, row.choices, row.logprobs) == (f"{source}-1", CHOICES, LOGPROBS)
    other = submit(db, job_of(b'{"prompt": "p", "n": 2, "logprobs": 0}'), reuse=True)
    assert get_batch(db, other).counts == Counts(waiting=1)


def test_a_retry_begins_without_choices_and_logprobs(db: Database) -> None:
    batch = submit(db, job_of(SEVERAL))
    record(db, f"{batch}-1", JobState.FAILED)
    assert retry_batch(db, batch, RetryChoice.of(JobState.FAILED)) == 1
    (row,) = iterate_results(db, batch, logprobs=True)
    assert (row.choices, row.logprobs, row.completion_tokens) == ((), None, None)


# -- the version before -------------------------------------------------------------------------------------------

#: what the version before wrote for `{"prompt": "p", "temperature": 0}`
OLD_REQUEST = (
    '{"prompt":"p","messages":null,"seed":99,"max_tokens":512,"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":0.0,'
    '"stop":[],"ignore_eos":false}'
)
OLD_KEY = "a17d19c096be0a0c912ec82293f7ee4117e1a288d2203b3b623fe278bf5e2ecf"
PROFILE_KEY = "0484dac30b56b1b954f273c9db81ceaf15be3e2be7837b7b58e7f53f3232bad2"
_DATA = f"""
INSERT INTO schema_version VALUES (3);
INSERT INTO model VALUES ('m', '{json.dumps(PROFILE)}', {START});
INSERT INTO batch (id, file_hash, status, parameters, priority, num_invalid_lines, submission, created_at,
    in_progress_at) VALUES ('batch_old', 'h', 'in_progress', '{{}}', 5, 0, 't', {START}, {START});
INSERT INTO job (id, batch_id, line, custom_id, model, url, state, attempt, deliveries, request_bytes, queued_at,
    claimed_at, recorded_at, request_key, profile_key, completion_tokens, duplicate_records, stale_records, request,
    text, token_ids, finish_reason)
  VALUES ('batch_old-1', 'batch_old', 1, 'a', 'm', '/v1/completions', 'completed', 1, 1, 15, 5.0, 6.0, 7.0,
    '{OLD_KEY}', '{PROFILE_KEY}', 2, 0, 0, :request, 'a text', '[1,2]', 'stop'),
  ('batch_old-2', 'batch_old', 2, 'b', 'm', '/v1/completions', 'running', 1, 1, 15, 5.0, 6.0, NULL, NULL, NULL, NULL,
    0, 0, :request, NULL, NULL, NULL);
"""


@pytest.fixture
def old_url(url: str) -> str:
    """The address of a database of version 3 with one batch."""
    engine = create_engine(parse_url(url))
    script = VERSION_3.read_text()
    if engine.dialect.name == "postgresql":
        script = script.replace("DOUBLE", "DOUBLE PRECISION")
    lines = [line for line in f"{script}{_DATA}".splitlines() if not line.startswith("--")]
    with engine.begin() as connection:
        for statement in "\n".join(lines).split(";"):
            if statement.strip():
                given = {"request": OLD_REQUEST} if ":request" in statement else {}
                connection.execute(text(statement), given)
    engine.dispose()
    return url


@pytest.fixture
def old(old_url: str) -> Iterator[Database]:
    with Database.open(old_url, clock=lambda: START + 100) as database:
        yield database


def test_an_upgraded_database_has_the_columns_of_a_new_one(
    old: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    new_url = f"sqlite:///{tmp_path}/new.sqlite3"
    if old.sqlite_file is None:
        new_url = request.getfixturevalue("postgres").new_schema()
    with Database.open(new_url) as new, new.read() as fresh, old.read() as upgraded:
        columns = [
            {item["name"]: item["type"].python_type for item in inspect(connection).get_columns("job")}
            for connection in (fresh, upgraded)
        ]
    assert columns[0] == columns[1]


def test_old_results_are_kept_and_jobs_under_way_can_end_with_choices(old: Database) -> None:
    (done, running) = iterate_results(old, "batch_old", logprobs=True)
    assert (done.text, done.token_ids, done.choices, done.logprobs) == ("a text", (1, 2), (), None)
    record(old, running.id)
    assert get_job(old, running.id).choices == CHOICES


def test_an_old_result_is_reused_by_a_request_that_asks_for_nothing_new(old: Database) -> None:
    batch = submit(old, job_of(b'{"prompt": "p", "temperature": 0, "n": 1, "logit_bias": {}}'), reuse=True)
    (row,) = iterate_results(old, batch)
    assert (row.reused_from, row.text) == ("batch_old-1", "a text")
    other = submit(old, job_of(b'{"prompt": "p", "temperature": 0, "min_tokens": 1}'), reuse=True)
    assert get_batch(old, other).counts == Counts(waiting=1)
