"""Commands whose database is not the one that the bookkeeper keeps, and results that came for no job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.errors import ExitCode
from storage.identity import read_identity
from storage.states import JobState
from tasks import keys, results
from tasks.heads import register_profile
from tasks.kept_database import publish
from tasks.results import ResultsReader
from tests.bookkeeping import outcome
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        register_profile(connection, "tiny", PROFILE)
        yield connection


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url, "SHARDQ_RELAY_URL": redis_url})


@pytest.fixture
def host(tmp_path: Path, redis_url: str) -> Shardq:
    """The commands of the host, where the bookkeeper's database is."""
    return Shardq(tmp_path / "host", {"SHARDQ_BROKER_URL": redis_url, "SHARDQ_RELAY_URL": redis_url})


def keep(host: Shardq, client: redis.Redis) -> tuple[str, str]:
    """A bookkeeper of the host is at work; id and place of its database."""
    client.set(keys.BOOKKEEPER, "at work")
    host("list")
    with host.database() as database:
        publish(client, database)
        return read_identity(database).id, database.place


def test_a_submission_that_nobody_would_record_is_refused_and_leaves_nothing(
    run: Shardq, host: Shardq, client: redis.Redis
) -> None:
    kept = keep(host, client)
    refused = run("submit", "-", "--name", "nightly", stdin=PROMPTS)
    assert refused.exit_code == ExitCode.ERROR
    message = error_of(refused)
    with run.database() as database:
        named = (*kept, read_identity(database).id, database.place)
    for part in (*named, "SHARDQ_DATABASE_URL", "over ssh", "`shardq bookkeeper`"):
        assert part in message
    assert json.loads(run("list", "--json").stdout) == []
    assert host("submit", "-", "--name", "nightly", stdin=PROMPTS).exit_code == ExitCode.OK


def test_a_retry_that_nobody_would_record_is_refused_and_changes_nothing(
    run: Shardq, host: Shardq, client: redis.Redis
) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED)
    keep(host, client)
    assert "not queued, the results would go elsewhere" in error_of(run("retry", batch))
    assert run.status(batch)["request_counts"]["failed"] == 1


def test_status_and_doctor_say_why_results_will_not_come(run: Shardq, host: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    assert run.status(batch)["obstacles"][0].startswith("no bookkeeper runs")
    kept, _ = keep(host, client)
    for shown in (run.status(batch), json.loads(run("status", "--json").stdout)):
        assert "results of this database will not come" in shown["obstacles"][0]
        assert kept in shown["obstacles"][0]
    found = run("doctor", "--json")
    (finding,) = [finding for finding in json.loads(found.stdout) if finding["check"] == "kept"]
    assert (found.exit_code, finding["grade"]) == (ExitCode.ERROR, "failed")
    assert kept in finding["text"]
    assert host("doctor", "--role", "host").exit_code == ExitCode.OK


def put_aside(client: redis.Redis, *jobs: str) -> None:
    """As the bookkeeper does with outcomes of jobs that it does not know."""
    for job in jobs:
        results.publish_outcome(client, outcome(job))
    reader = ResultsReader(client)
    for entry, fields in reader.read(0):
        reader.put_aside(entry, fields)


def test_results_that_came_for_no_job_are_shown_and_taken_in_by_the_database_that_has_it(
    run: Shardq, host: Shardq, client: redis.Redis
) -> None:
    assert "nothing is kept" in run("rejected").stderr
    batch = run.submit()
    put_aside(client, f"{batch}-1", "batch_of_nobody-1")
    doctor = {finding["check"]: finding for finding in json.loads(host("doctor", "--json").stdout)}
    assert doctor["rejected"]["grade"] == "warning"
    assert "2 outcomes of no job in the bookkeeper's database: `shardq rejected`" in doctor["rejected"]["text"]
    assert f"{batch}-1" in host("rejected").stdout
    shown = json.loads(host("rejected", "--json").stdout)
    assert [(row["job"], row["state"], row["why"]) for row in shown] == [
        (f"{batch}-1", "completed", "no such job"),
        ("batch_of_nobody-1", "completed", "no such job"),
    ]
    assert json.loads(host("rejected", "--apply", "--json").stdout) == {"recorded": 0, "superfluous": 0, "left": 2}

    taken = run("rejected", "--apply")
    assert taken.stdout == "recorded 1 outcome\n"
    assert "1 record left, of no job in " in taken.stderr
    assert run.jobs(batch)["a"].text == "there"

    assert "--yes" in error_of(run("rejected", "--drop"))
    assert run("rejected", "--drop", "--yes").stdout == "threw away 1 record\n"
    assert json.loads(run("rejected", "--json").stdout) == []


def test_what_cannot_be_read_is_shown_as_it_came(run: Shardq, client: redis.Redis) -> None:
    client.xadd(keys.REJECTED, {"kind": "outcome", "json": "{"})
    results.put_aside(client, {"no": "job"})
    unreadable, message = json.loads(run("rejected", "--json").stdout)
    assert (unreadable["job"], unreadable["record"]) == (None, "{")
    assert (message["why"], message["record"]) == ("a message that names no job", '{"no": "job"}')
    assert run("rejected").exit_code == ExitCode.OK
    assert run("rejected", "--apply", "--drop").exit_code == ExitCode.USAGE
