"""`cancel` and `retry` against a real queue server and a real database, without any other process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.errors import ExitCode
from storage.states import JobState
from tasks import keys
from tasks.generation import REQUEST_FAILURES
from tasks.heads import register_profile
from tasks.queues import num_waiting
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of, numbered


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        register_profile(connection, "tiny", PROFILE)
        yield connection


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


@pytest.fixture
def narrow(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    """Feeds one job at a time, so that the others wait in the database."""
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url, "SHARDQ_WINDOW_MIN_JOBS": "1"})


def states(run: Shardq, batch: str) -> dict[str, str]:
    return {name: job.state.value for name, job in run.jobs(batch).items()}


def hold(client: redis.Redis, run: Shardq, batch: str, *custom_ids: str) -> None:
    """Let jobs be in the hands of a head."""
    run.start_jobs(batch, *custom_ids)
    for name in custom_ids:
        job = run.jobs(batch)[name]
        client.set(keys.job(f"{job.id}.{job.attempt}"), "h-1")
    client.delete(*keys.ready("tiny"))


def test_what_nobody_holds_is_cancelled_at_once_and_what_runs_is_said_to_stop(
    narrow: Shardq, client: redis.Redis
) -> None:
    batch = narrow.submit(numbered(3))
    hold(client, narrow, batch, "job-1")
    result = narrow("cancel", batch)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout == f"{batch} cancelling\n"
    assert "2 jobs cancelled at once, 1 still stopping" in result.stderr
    assert f"`shardq status {batch}`" in result.stderr
    assert states(narrow, batch) == {"job-1": "running", "job-2": "cancelled", "job-3": "cancelled"}
    status = narrow("status", batch)
    assert status.exit_code == ExitCode.UNFINISHED
    assert "cancelling: 1 job still stopping" in status.stdout
    assert "no bookkeeper runs" in status.stderr
    assert "no head" not in status.stderr


def test_engines_hear_of_a_cancel_without_a_bookkeeper(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    hold(client, run, batch, "a")
    run("cancel", batch)
    assert f"{batch}-1.1".encode() in client.hkeys(keys.STOPS)


def test_what_stands_in_the_queue_is_taken_out_of_it(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    assert num_waiting(client, "tiny") == 2
    result = run("cancel", batch)
    assert result.stdout == f"{batch} cancelled\n"
    assert "2 jobs cancelled at once\n" in result.stderr
    assert num_waiting(client, "tiny") == 0
    assert run("status", batch).exit_code == ExitCode.JOBS_FAILED


def test_a_lost_job_ends_while_the_command_waits_for_it(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    client.delete(*keys.ready("tiny"))
    started = time.monotonic()
    result = run("cancel", batch, "--wait")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout == f"{batch} cancelled\n"
    assert "2/2 done, 0 failed, 2 cancelled" in result.stderr
    assert time.monotonic() - started < 15


def test_cancelling_again_changes_nothing(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    hold(client, run, batch, "a", "b")
    run("cancel", batch)
    again = run("cancel", batch)
    assert again.exit_code == ExitCode.OK
    assert "2 jobs still stopping" in again.stderr
    run.end_jobs(batch, a=JobState.CANCELLED, b=JobState.CANCELLED)
    last = run("cancel", batch)
    assert last.exit_code == ExitCode.OK
    assert last.stdout == f"{batch} cancelled\n"
    assert "was cancelled before" in last.stderr


def test_a_batch_that_has_ended_otherwise_cannot_be_cancelled(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch)
    result = run("cancel", batch)
    assert result.exit_code == ExitCode.ERROR
    assert error_of(result) == f"Error: {batch} is completed: there is nothing to cancel"


@pytest.mark.parametrize("form", ["{batch}-2", "nightly-2", "batch_req_{rest}-2", "{batch}-2.1"])
def test_one_job_is_cancelled_by_any_of_its_names(narrow: Shardq, form: str) -> None:
    batch = narrow.submit(numbered(3), "--name", "nightly")
    result = narrow("cancel", form.format(batch=batch, rest=batch.removeprefix("batch_")))
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout == f"{batch}-2 cancelled\n"
    assert states(narrow, batch) == {"job-1": "queued", "job-2": "cancelled", "job-3": "waiting"}
    assert narrow.status(batch)["status"] == "in_progress"


def test_a_batch_whose_name_looks_like_a_job_is_a_batch(narrow: Shardq) -> None:
    other = narrow.submit(numbered(2), "--name", "nightly-2")
    narrow.submit(numbered(3), "--name", "nightly")
    assert narrow("cancel", "nightly-2").stdout == f"{other} cancelled\n"


def test_a_running_job_is_still_stopping(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    hold(client, run, batch, "a")
    result = run("cancel", f"{batch}-1")
    assert result.stdout == f"{batch}-1 cancelling\n"
    assert "1 job still stopping" in result.stderr
    run.end_jobs(batch, a=JobState.CANCELLED)
    assert "was cancelled before" in run("cancel", f"{batch}-1").stderr
    assert run.status(batch)["status"] == "completed"


def test_a_completed_job_cannot_be_cancelled(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch)
    assert error_of(run("cancel", f"{batch}-1")) == f"Error: {batch}-1 is completed: there is nothing to cancel"


@pytest.mark.parametrize("reference", ["nothing", "nothing-1", "nightly-7", "-"])
def test_what_does_not_exist_is_one_line(run: Shardq, reference: str) -> None:
    run.submit(PROMPTS, "--name", "nightly")
    result = run("cancel", reference)
    assert result.exit_code == ExitCode.ERROR
    assert error_of(result).startswith("Error: no job" if reference == "nightly-7" else "Error: no batch or job")


def test_without_a_queue_server_a_cancel_is_still_decided(run: Shardq) -> None:
    batch = run.submit()
    result = run("cancel", batch, SHARDQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert result.exit_code == ExitCode.OK
    assert "engines will hear of it" in result.stderr
    assert run.status(batch)["status"] == "cancelling"


def test_a_cancel_as_json_is_the_batch_and_what_was_stopped(narrow: Shardq, client: redis.Redis) -> None:
    batch = narrow.submit(numbered(3))
    hold(client, narrow, batch, "job-1")
    shown = json.loads(narrow("cancel", batch, "--json").stdout)
    assert (shown["id"], shown["object"], shown["status"]) == (batch, "batch", "cancelling")
    assert shown["stopped"] == {"ended": 2, "stopping": 1}
    assert isinstance(shown["cancelling_at"], int)
    job = json.loads(narrow("cancel", f"{batch}-1", "--json").stdout)
    assert (job["id"], job["batch_id"], job["custom_id"]) == (f"{batch}-1", batch, "job-1")


def test_finished_results_and_partial_texts_of_a_cancelled_batch_are_kept(
    run: Shardq, client: redis.Redis, tmp_path: Path
) -> None:
    batch = run.submit(numbered(3))
    hold(client, run, batch, "job-1", "job-2")
    run("cancel", batch)
    run.end_jobs(batch, **{"job-2": JobState.CANCELLED, "job-3": JobState.CANCELLED})
    errors = tmp_path / "errors.jsonl"
    result = run("results", batch, "--errors", str(errors))
    assert result.exit_code == ExitCode.JOBS_FAILED
    assert [json.loads(line)["custom_id"] for line in result.stdout.splitlines()] == ["job-1"]
    stopped = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [line["error"]["code"] for line in stopped] == ["cancelled", "cancelled"]
    assert stopped[0]["shardq"] == {"partial_text": "Größe,\nzwei"}
    assert "cancelled" in run("results", batch, "--format", "table").stdout
    assert "3: 1 completed, 2 cancelled" in run("status", batch).stdout


# -- retry ------------------------------------------------------------------------------------------------------------


def test_failed_jobs_run_again_and_the_others_keep_their_results(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    client.delete(*keys.ready("tiny"))
    run.end_jobs(batch, a=JobState.FAILED, code="too_many_tries")
    result = run("retry", batch)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout == f"{batch}\n"
    assert "1 job run again" in result.stderr
    assert num_waiting(client, "tiny") == 1
    jobs = run.jobs(batch)
    assert (jobs["a"].state, jobs["a"].attempt, jobs["a"].error_type) == (JobState.QUEUED, 2, None)
    assert (jobs["b"].state, jobs["b"].attempt) == (JobState.COMPLETED, 1)
    assert run.status(batch)["status"] == "in_progress"
    run.end_jobs(batch)
    assert run("status", batch).exit_code == ExitCode.OK


def test_cancelled_jobs_run_again_only_if_asked_for(run: Shardq) -> None:
    batch = run.submit()
    run("cancel", batch)
    run.end_jobs(batch, a=JobState.CANCELLED, b=JobState.CANCELLED)
    nothing = run("retry", batch)
    assert nothing.exit_code == ExitCode.OK
    assert nothing.stdout == ""
    assert "nothing to run again" in nothing.stderr
    assert "2 jobs cancelled: --cancelled" in nothing.stderr
    assert run.status(batch)["status"] == "cancelled"
    shown = json.loads(run("retry", batch, "--cancelled", "--json").stdout)
    assert shown["retried"] == 2
    assert (shown["status"], shown["cancelled_at"], shown["cancelling_at"]) == ("in_progress", None, None)
    assert states(run, batch) == {"a": "queued", "b": "queued"}


def test_retrying_twice_runs_nothing_twice(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED, code="too_many_tries")
    run("retry", batch)
    result = run("retry", batch)
    assert result.exit_code == ExitCode.ERROR
    assert f"`shardq cancel {batch}`" in error_of(result)
    assert run.jobs(batch)["a"].attempt == 2


def test_an_expired_batch_runs_again_with_another_end_or_none(run: Shardq) -> None:
    batch = run.submit(PROMPTS, "--expires-in", "1")
    run.end_jobs(batch, a=JobState.EXPIRED)
    time.sleep(1.1)
    assert json.loads(run("retry", batch, "--json").stdout)["expires_at"] is None
    run.end_jobs(batch, a=JobState.EXPIRED)
    before = time.time()
    shown = json.loads(run("retry", batch, "--expired", "--expires-in", "2h", "--json").stdout)
    assert before + 7199 <= shown["expires_at"] <= time.time() + 7200


@pytest.mark.parametrize("code", sorted(REQUEST_FAILURES))
def test_what_cannot_succeed_is_left_out_until_it_is_named(run: Shardq, code: str) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED, code=code)
    left_out = run("retry", batch)
    assert (left_out.exit_code, left_out.stdout) == (ExitCode.OK, "")
    assert f"left out, since they would fail again as they are: 1 job with {code} (--code {code} " in left_out.stderr
    assert run("retry", batch, "--failed").stdout == ""
    assert json.loads(run("retry", batch, "--code", code, "--json").stdout)["retried"] == 1
    run.end_jobs(batch, a=JobState.FAILED, code=code)
    assert json.loads(run("retry", batch, "--job", "a", "--json").stdout)["retried"] == 1


def test_codes_choose_among_failed_expired_and_cancelled_jobs(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED, code="out_of_memory")
    nothing = run("retry", batch, "--code", "too_many_tries")
    assert (nothing.exit_code, nothing.stdout) == (ExitCode.OK, "")
    assert f"no job of {batch} is failed or cancelled or expired with too_many_tries" in nothing.stderr
    retried = run("retry", batch, "--code", "too_many_tries", "--code", "out_of_memory", "--json")
    assert json.loads(retried.stdout)["retried"] == 1


def test_a_job_is_named_by_custom_id_or_by_its_id(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED, b=JobState.FAILED)
    assert json.loads(run("retry", batch, "--job", f"{batch}-2", "--job", "a", "--json").stdout)["retried"] == 2
    other = run.submit()
    run.end_jobs(batch)
    unknown = "is no job of " + batch
    assert unknown in error_of(run("retry", batch, "--job", f"{other}-1"))
    # no beginning of an id, which is hexadecimal
    assert "no batch or job 'nobody'" in error_of(run("retry", batch, "--job", "nobody"))
    assert "is completed: only a job that failed" in error_of(run("retry", batch, "--job", "a"))


def test_a_retry_waits_for_the_queue_server_in_the_database(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED, code="too_many_tries")
    result = run("retry", batch, SHARDQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert result.exit_code == ExitCode.OK
    assert "the bookkeeper will queue the jobs" in result.stderr
    assert states(run, batch) == {"a": "waiting", "b": "completed"}
