"""A database of an older schema is upgraded with all it holds, on both kinds of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text

from storage.batch_records import Counts, NewBatch
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database, parse_url
from storage.job_records import NewJob, OutcomeRow, Stopped
from storage.jobs import claim_waiting, get_job, iterate_results, progress, queued_or_running
from storage.outcomes import record_outcomes, unknown_records
from storage.retries import RetryChoice, retry_batch
from storage.reuse import reuse_results
from storage.served_models import list_models
from storage.states import BatchStatus, JobState
from storage.stops import cancel_batch, expire_due, pending_stops, settle_stops

pytest_plugins = ["tests.integration.storage_databases"]

VERSION_1 = Path(__file__).with_name("storage_version_1.sql")
START = 1_700_000_000.0
REQUEST = '{"prompt":"p","seed":1,"temperature":0.0}'

_DATA = f"""
INSERT INTO schema_version VALUES (1);
INSERT INTO counter VALUES ('unknown_records', 4);
INSERT INTO model VALUES ('m', '{{"dtype": "float32"}}', {START});
INSERT INTO batch (id, name, file_hash, status, endpoint, parameters, priority, num_invalid_lines, submission,
    created_at, in_progress_at, finalizing_at, completed_at)
  VALUES ('batch_done', 'done', 'h', 'completed', '/v1/completions', '{{"seed": 1}}', 0, 2, 't', {START}, {START + 1},
    {START + 9}, {START + 9}),
  ('batch_open', NULL, 'h', 'in_progress', NULL, '{{}}', 0, 0, 't', {START}, {START + 2}, NULL, NULL);
"""
_JOBS = [
    ("batch_done", 1, "completed", 1, "a text", "[1,2]", 2),
    ("batch_done", 2, "failed", 1, None, None, None),
    ("batch_open", 1, "completed", 1, "another", "[3]", 1),
    ("batch_open", 2, "running", 1, None, None, None),
    ("batch_open", 3, "queued", 2, None, None, None),
    ("batch_open", 4, "waiting", 1, None, None, None),
]


def _statements(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]


@pytest.fixture
def old_url(url: str) -> str:
    """The address of a database of version 1 with two batches."""
    engine = create_engine(parse_url(url))
    script = VERSION_1.read_text()
    if engine.dialect.name == "postgresql":
        script = script.replace("DOUBLE", "DOUBLE PRECISION")
    with engine.begin() as connection:
        for statement in [*_statements(script), *_statements(_DATA)]:
            connection.exec_driver_sql(statement)
        for batch_id, line, state, attempt, written, token_ids, number in _JOBS:
            connection.execute(
                text(
                    "INSERT INTO job (id, batch_id, line, custom_id, model, url, state, attempt, deliveries, "
                    "request_bytes, queued_at, claimed_at, recorded_at, duplicate_records, stale_records, request, "
                    "text, token_ids, completion_tokens) VALUES (:id, :batch_id, :line, :custom_id, 'm', 'u', :state, "
                    ":attempt, 1, 15, 5.0, 6.0, 7.0, 0, 0, :request, :text, :token_ids, :number)"
                ),
                {
                    "id": f"{batch_id}-{line}",
                    "batch_id": batch_id,
                    "line": line,
                    "custom_id": f"c{line}",
                    "state": state,
                    "attempt": attempt,
                    "request": REQUEST,
                    "text": written,
                    "token_ids": token_ids,
                    "number": number,
                },
            )
    engine.dispose()
    return url


@pytest.fixture
def db(old_url: str) -> Iterator[Database]:
    with Database.open(old_url, clock=lambda: START + 100) as database:
        yield database


def _schema(db: Database) -> dict[str, Any]:
    """All that the database says about our tables, in comparable form."""
    with db.read() as connection:
        found = inspect(connection)
        return {
            name: {
                "columns": {
                    item["name"]: (item["type"].python_type, item["nullable"]) for item in found.get_columns(name)
                },
                "indexes": {
                    item["name"]: (item["column_names"], {str(v) for v in item.get("dialect_options", {}).values()})
                    for item in found.get_indexes(name)
                },
                "unique": sorted(item["column_names"] for item in found.get_unique_constraints(name)),
                "keys": [item["constrained_columns"] for item in found.get_foreign_keys(name)],
            }
            for name in found.get_table_names()
        }


def test_an_upgraded_database_has_the_schema_of_a_new_one(
    db: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if db.sqlite_file is not None:
        new_url = f"sqlite:///{tmp_path}/new.sqlite3"
    else:
        new_url = request.getfixturevalue("postgres").new_schema()
    with Database.open(new_url) as new:
        assert _schema(db) == _schema(new)


def test_an_upgrade_keeps_everything(db: Database) -> None:
    done, running = get_batch(db, "done"), get_batch(db, "batch_open")
    assert (done.status, done.counts, done.parameters) == (
        BatchStatus.COMPLETED,
        Counts(completed=1, failed=1),
        {"seed": 1},
    )
    assert (done.created_at, done.completed_at, done.num_invalid_lines) == (START, START + 9, 2)
    assert running.counts == Counts(waiting=1, queued=1, running=1, completed=1)
    first, second = iterate_results(db, "batch_done")
    assert (first.text, first.token_ids, first.completion_tokens, first.recorded_at) == ("a text", (1, 2), 2, 7.0)
    assert (first.stop_reason, first.reused_from, second.text) == (None, None, None)
    assert progress(db, "batch_open").completion_tokens == 1
    assert (unknown_records(db), [item.name for item in list_models(db)]) == (4, ["m"])


def test_old_batches_get_the_usual_priority(db: Database) -> None:
    assert {get_batch(db, batch_id).priority for batch_id in ("batch_done", "batch_open")} == {5}


def test_jobs_under_way_go_on_after_the_upgrade(db: Database) -> None:
    (claimed,) = claim_waiting(db, "m", max_jobs=9, max_bytes=10**6)
    assert (claimed.id, claimed.attempt) == ("batch_open-4", 1)
    in_flight = {(item.id, item.attempt) for item in queued_or_running(db, "m")}
    assert in_flight == {("batch_open-2", 1), ("batch_open-3", 2), ("batch_open-4", 1)}

    outcomes = [OutcomeRow(job_id, attempt, "h", JobState.COMPLETED, "x") for job_id, attempt in sorted(in_flight)]
    assert record_outcomes(db, outcomes).ended_batches == ("batch_open",)


def test_old_jobs_can_be_stopped_and_retried(db: Database) -> None:
    assert expire_due(db) == Stopped(0, 0)
    assert cancel_batch(db, "batch_open") == Stopped(1, 2)
    assert settle_stops(db, pending_stops(db)) == 2
    assert get_batch(db, "batch_open").status is BatchStatus.CANCELLED

    assert retry_batch(db, "batch_done", RetryChoice.of(JobState.FAILED)) == 1
    assert get_job(db, "batch_done-2").attempt == 2


def test_old_results_without_a_known_profile_are_not_reused(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, [NewJob(1, "id-1", "m", "u", REQUEST)])
    assert reuse_results(db, submission) == 0
    assert publish_batch(db, submission).counts == Counts(waiting=1)
