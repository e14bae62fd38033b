"""`submit`: urgency, deadlines, stored results, and what a killed submission leaves."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.errors import ExitCode
from cli.processes import child_environment, shardq_argv
from storage.batches import list_batches
from storage.states import BatchStatus, JobState
from tasks import keys
from tasks.heads import register_profile
from tasks.queues import num_waiting
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of, numbered

GREEDY = b'{"custom_id": "a", "prompt": "one", "temperature": 0}\n{"custom_id": "b", "prompt": "two", "seed": 3}\n'


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        register_profile(connection, "tiny", PROFILE)
        yield connection


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


def test_a_batch_is_as_urgent_as_it_was_said_to_be(run: Shardq, client: redis.Redis) -> None:
    usual, urgent = run.submit(), run.submit(PROMPTS, "--priority", "0")
    assert (run.status(usual)["priority"], run.status(urgent)["priority"]) == (5, 0)
    assert client.llen(keys.ready_at(keys.queue("tiny"), 0)) == 2
    assert "priority       0" in run("status", urgent).stdout


def test_a_name_that_hides_a_job_or_looks_like_an_id_is_refused(run: Shardq) -> None:
    batch = run.submit(PROMPTS, "--name", "nightly")
    for name, message in (
        ("nightly-1", f"means line 1 of {batch}"),
        (f"{batch}-2", "ids begin with batch_"),
        (batch, "ids begin with batch_"),
    ):
        result = run("submit", "--name", name, "-", stdin=PROMPTS)
        assert result.exit_code == ExitCode.ERROR
        assert message in error_of(result)
    for name in ("nightly-3", "nightly-1b", "nightly"):  # no third line; no job; the same batch again
        assert run("submit", "--name", name, "-", stdin=PROMPTS).exit_code == ExitCode.OK


@pytest.mark.parametrize("value", ["10", "-1", "high"])
def test_an_urgency_that_does_not_exist_is_wrong_usage(run: Shardq, value: str) -> None:
    result = run("submit", "--priority", value, "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "--priority" in error_of(result)


@pytest.mark.parametrize("option", ["--expires-in", "--completion-window"])
def test_a_batch_expires_when_it_was_told_to(run: Shardq, option: str) -> None:
    shown = run.status(run.submit(PROMPTS, option, "24h"))
    assert shown["completion_window"] == "24h"
    assert shown["expires_at"] - shown["created_at"] in (86_400, 86_401)


def test_a_duration_that_is_none_is_wrong_usage(run: Shardq) -> None:
    result = run("submit", "--expires-in", "soon", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "expected a duration such as 90s, 10m, 2h or 7d" in error_of(result)


def test_a_line_with_a_deadline_of_its_own_expires_alone(run: Shardq) -> None:
    data = b'{"custom_id": "a", "prompt": "one", "expires_in": "10m"}\n{"custom_id": "b", "prompt": "two"}\n'
    batch = run.submit(data)
    with run.database() as database, database.read() as connection:
        rows = connection.exec_driver_sql("SELECT custom_id, expires_at FROM job ORDER BY line").all()
    assert rows[0][1] == pytest.approx(time.time() + 600, abs=60)
    assert rows[1][1] is None
    assert run.status(batch)["expires_at"] is None


def test_the_batch_object_has_every_field_of_openais_and_whole_seconds(run: Shardq) -> None:
    batch = run.submit(PROMPTS, "--name", "nightly", "--expires-in", "2h")
    run.end_jobs(batch, a=JobState.FAILED)
    shown = run.status(batch)
    assert (shown["object"], shown["status"], shown["endpoint"]) == ("batch", "completed", "/v1/completions")
    assert shown["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert shown["usage"]["output_tokens"] == 3
    assert shown["metadata"] == {"name": "nightly"}
    assert shown["errors"] is None
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        assert shown[name].startswith("file-")
    for name in ("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"):
        assert isinstance(shown[name], int), name
    for name in ("failed_at", "expired_at", "cancelling_at", "cancelled_at"):
        assert shown[name] is None


def test_stored_results_are_taken_without_a_head(run: Shardq, client: redis.Redis) -> None:
    run.end_jobs(first := run.submit(GREEDY))
    client.delete(*keys.ready("tiny"))
    result = run("submit", "--reuse", "-", stdin=GREEDY)
    assert result.exit_code == ExitCode.OK, result.stderr
    batch = result.stdout.strip()
    assert "2 of 2 jobs had a stored result" in result.stderr
    assert f"`shardq results {batch}`" in result.stderr
    assert num_waiting(client, "tiny") == 0
    assert run("status", batch).exit_code == ExitCode.OK
    lines = [json.loads(line) for line in run("results", batch).stdout.splitlines()]
    assert [line["shardq"]["reused_from"] for line in lines] == [f"{first}-1", f"{first}-2"]
    assert lines[0]["response"]["body"]["choices"][0]["text"] == "Größe,\nzwei"


def test_waiting_for_stored_results_returns_at_once(run: Shardq) -> None:
    run.end_jobs(run.submit(GREEDY))
    result = run("submit", "--reuse", "--wait", "-", stdin=GREEDY)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "reused         2" in result.stdout


def test_only_the_same_request_is_reused_and_only_if_asked_for(run: Shardq) -> None:
    run.end_jobs(run.submit(GREEDY))
    assert run.status(run.submit(GREEDY))["job_counts"]["completed"] == 0
    other = GREEDY.replace(b"one", b"uno").replace(b'"seed": 3', b'"seed": 4')
    assert run.status(run.submit(other, "--reuse"))["job_counts"]["completed"] == 0


def test_submitting_again_says_what_stays_as_it_was(run: Shardq) -> None:
    first = run.submit(PROMPTS, "--name", "nightly")
    run.end_jobs(first, a=JobState.FAILED)
    again = run("submit", "--name", "nightly", "--priority", "1", "-", stdin=PROMPTS)
    assert again.stdout.strip() == first
    assert "its priority stays 5" in again.stderr
    assert f"`shardq retry {first}`" in again.stderr


def test_a_name_that_is_taken_comes_with_the_ways_out(run: Shardq) -> None:
    run.submit(PROMPTS, "--name", "nightly")
    message = error_of(run("submit", "--name", "nightly", "-", stdin=numbered(1)))
    assert "--name" in message
    assert "`shardq delete nightly`" in message


def killed(*_: object, **__: object) -> None:
    raise SystemExit(9)


def wait_until_half_written(run: Shardq) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with run.database() as database:
            if any(row.counts.total for row in list_batches(database, statuses=[BatchStatus.VALIDATING])):
                return
        time.sleep(0.005)
    raise AssertionError("nothing was written")


def test_a_killed_submission_leaves_nothing_that_runs_and_is_done_again_by_the_same_command(
    run: Shardq, client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    count = 20_000
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(numbered(count))
    command = ("submit", str(path), "--name", "nightly", "--priority", "2", "--expires-in", "1h")
    with run.database():
        pass  # the tables are there
    environment = child_environment({"SHARDQ_DATA_DIR": str(run.data_dir), "SHARDQ_BROKER_URL": redis_url})
    environment["SHARDQ_DATABASE_URL"] = run.database_url
    process = subprocess.Popen(shardq_argv(*command), env=environment, stdout=subprocess.PIPE, text=True)
    wait_until_half_written(run)
    process.kill()
    out, _ = process.communicate()
    assert out == ""
    cut_off = run.status("nightly")
    assert cut_off["status"] == "validating"
    assert 0 < cut_off["request_counts"]["total"] < count
    assert client.llen(keys.ready_at(keys.queue("tiny"), 2)) == 0
    assert "submit it again" in run("status", "nightly").stdout

    again = run(*command)
    assert again.exit_code == ExitCode.OK, again.stderr
    assert again.stdout.strip() == cut_off["id"]
    assert "was cut off" in again.stderr
    whole = run.status("nightly")
    assert (whole["status"], whole["request_counts"]["total"], whole["priority"]) == ("in_progress", count, 2)
    with run.database() as database, database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(DISTINCT line) FROM job").scalar_one() == count
    assert client.llen(keys.ready_at(keys.queue("tiny"), 2)) > 0


def test_a_submission_that_was_cut_off_and_then_cancelled_names_a_way_that_works(
    run: Shardq, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cli.client.submission.publish_batch", killed)
        patch.setattr("cli.client.submission.discard_batch", lambda *_: None)
        assert run("submit", "--name", "big", "-", stdin=PROMPTS).exit_code == 9
    assert f"cut off (submit it again, or `shardq delete {run.status('big')['id']}`)" in run("list").stderr
    run("cancel", "big")
    batch = run.status("big")["id"]
    partly = f"not all of its file was written (`shardq delete {batch}`, then submit it again)"
    assert f"cancelled: {partly}" in run("status", "big").stdout
    assert run("list").stderr == f"{batch} is cancelled: {partly}\n"
    assert f"`shardq delete {batch}`, then submit" in run("follow", f"{batch}-1").stderr
    assert f"`shardq delete {batch}`, then submit" in error_of(run("retry", "big", "--cancelled"))
    refusal = error_of(run("submit", "--name", "big", "-", stdin=PROMPTS))
    assert "`shardq delete big` first, or give another --name" in refusal
    assert "retry" not in refusal
    assert run("delete", "big", "--yes").exit_code == ExitCode.OK
    assert run.status(run.submit(PROMPTS, "--name", "big"))["status"] == "in_progress"


def test_the_end_of_a_resumed_submission_counts_from_then(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cli.client.submission.publish_batch", killed)
        patch.setattr("cli.client.submission.discard_batch", lambda *_: None)
        assert run("submit", "--name", "x", "--expires-in", "1", "-", stdin=PROMPTS).exit_code == 9
    before = time.time()
    batch = run.submit(PROMPTS, "--name", "x", "--expires-in", "1h", "--priority", "1")
    shown = run.status(batch)
    assert shown["expires_at"] >= before + 3599
    assert shown["priority"] == 1
