"""Cancel, expiry, retry, followers, urgency, fairness and stored results, through real processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.errors import ExitCode
from cli.processes import child_environment, shardq_argv
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.job_records import JobRow, OutcomeRow
from storage.outcomes import record_outcomes
from storage.states import BatchStatus, JobState
from tests.acceptance.system import PATIENCE_S, System
from tests.models import tiny_model

#: context of the served model: room for jobs that run for a while
CONTEXT = 4096
SLOTS = 4
#: jobs fed at a time
WINDOW = 4


@pytest.fixture(scope="module")
def steady_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Decodes plainly, so that over the long link a job's length is its time, and feeds few jobs ahead."""
    model = tiny_model(tmp_path_factory.mktemp("models") / "patient", context=CONTEXT)
    with pytest.MonkeyPatch.context() as patch, System(tmp_path_factory.mktemp("steady"), model) as system:
        patch.setenv("SHARDQ_WINDOW_MIN_JOBS", str(WINDOW))
        patch.setenv("SHARDQ_WINDOW_PER_SLOT", "1")
        system.start_bookkeeper()
        system.start_tail(max_length=CONTEXT, slots=SLOTS)
        start_head(system)
        yield system


@pytest.fixture
def steady(steady_system: System, request: pytest.FixtureRequest) -> Iterator[System]:
    steady_system.wait_consuming()
    yield steady_system
    request.node.add_report_section("teardown", "processes", steady_system.new_logs())


@pytest.fixture
def held(steady: System) -> Iterator[System]:
    """As `steady`, over the long link: what runs goes on, and does not end."""
    with steady.slow():
        yield steady


def start_head(system: System) -> None:
    system.start_head(max_length=CONTEXT, slots=SLOTS, drafter="none", draft_length=0, lanes=1)


def long(name: str, max_tokens: int = 3500, **values: Any) -> dict[str, Any]:
    """Over the long link, a job of many minutes."""
    return {"custom_id": name, "prompt": f"{name}:", "max_tokens": max_tokens, "ignore_eos": True, "seed": 7, **values}


def short(name: str, max_tokens: int = 4, **values: Any) -> dict[str, Any]:
    return long(name, max_tokens, **values)


def batch_of(system: System, reference: str) -> BatchRow:
    with Database.open(system.environment["SHARDQ_DATABASE_URL"]) as database:
        return get_batch(database, reference)


def jobs_of(system: System, batch: str) -> dict[str, JobRow]:
    return {job.custom_id: job for job in system.jobs(batch)}


def expire_now(system: System, batch: str) -> None:
    """As if the time at which the batch expires had come."""
    with Database.open(system.environment["SHARDQ_DATABASE_URL"]) as database, database.write() as connection:
        connection.exec_driver_sql("UPDATE batch SET expires_at = ? WHERE id = ?", (time.time(), batch))


def follow(system: System, job: str) -> subprocess.Popen[str]:
    """`shardq follow JOB --json`, in a process of its own."""
    environment = child_environment(system.environment)
    return subprocess.Popen(
        shardq_argv("follow", job, "--json"), env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def wait_writing(system: System, count: int) -> None:
    """Wait until so many jobs run, and tokens have been written."""
    system.wait_until(lambda: sum(head.running for head in system.heads()) >= count, f"{count} running jobs")
    system.wait_until(lambda: any(head.tokens_per_s > 0 for head in system.heads()), "tokens")


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_a_cancelled_batch_stops_and_keeps_what_it_has(held: System, tmp_path: Path) -> None:
    names = [f"long-{n}" for n in range(2 * SLOTS)]
    batch = held.submit([short("quick-1"), short("quick-2"), *(long(name) for name in names)])
    held.wait_for(batch, completed=2)
    wait_writing(held, SLOTS)

    follower = follow(held, f"{batch}-3")
    assert follower.stdout is not None
    first = json.loads(follower.stdout.readline())  # comes while the job runs
    result = held.shardq("cancel", batch, "--wait")
    assert result.returncode == ExitCode.OK, result.stderr
    assert result.stdout == f"{batch} cancelled\n"
    followed = [first, *map(json.loads, follower.communicate(timeout=PATIENCE_S)[0].splitlines())]
    assert "".join(line.get("text", "") for line in followed) == jobs_of(held, batch)["long-0"].text
    assert (first["position"], followed[-1]["status"], follower.returncode) == (0, "cancelled", ExitCode.JOBS_FAILED)
    assert "cancelled at once" in result.stderr
    assert batch_of(held, batch).status is BatchStatus.CANCELLED

    jobs = jobs_of(held, batch)
    assert (jobs["quick-1"].state, jobs["quick-2"].state) == (JobState.COMPLETED, JobState.COMPLETED)
    assert {jobs[name].state for name in names} == {JobState.CANCELLED}
    assert 1 <= len([name for name in names if jobs[name].text]) <= SLOTS

    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    results = held.shardq("results", batch, "--output", str(out), "--errors", str(errors))
    assert results.returncode == ExitCode.JOBS_FAILED
    assert list(lines_of(out)) == ["quick-1", "quick-2"]
    stopped = lines_of(errors)
    assert {line["error"]["code"] for line in stopped.values()} == {"cancelled"}
    assert {name: stopped[name].get("shardq", {}).get("partial_text") for name in names} == {
        name: jobs[name].text for name in names
    }
    held.wait_until(lambda: not any(head.running for head in held.heads()), "idle head", timeout_s=10)


def test_a_cancelled_job_stops_alone(held: System) -> None:
    batch = held.submit([long("stops"), long("goes-on")])
    wait_writing(held, 2)
    result = held.shardq("cancel", f"{batch}-1", "--wait")
    assert result.returncode == ExitCode.OK, result.stderr
    assert result.stdout == f"{batch}-1 cancelled\n"
    jobs = jobs_of(held, batch)
    assert jobs["stops"].state is JobState.CANCELLED
    assert jobs["goes-on"].state is JobState.RUNNING
    assert batch_of(held, batch).status is BatchStatus.IN_PROGRESS
    assert held.shardq("cancel", batch, "--wait").returncode == ExitCode.OK


def test_cancelled_jobs_run_again_and_write_what_they_would_have_written(steady: System) -> None:
    with steady.slow():
        batch = steady.submit([long("a", 400), short("b")])
        steady.wait_for(batch, completed=1)
        wait_writing(steady, 1)
        assert steady.shardq("cancel", batch, "--wait").returncode == ExitCode.OK
    stopped = jobs_of(steady, batch)
    assert stopped["a"].text

    result = steady.shardq("retry", batch, "--cancelled")
    assert result.returncode == ExitCode.OK, result.stderr
    assert "1 job run again" in result.stderr
    assert steady.wait_for(batch).status is BatchStatus.COMPLETED
    jobs = jobs_of(steady, batch)
    assert (jobs["a"].attempt, jobs["a"].completion_tokens) == (2, 400)
    assert (jobs["a"].text or "").startswith(stopped["a"].text)
    assert jobs["b"] == stopped["b"]
    assert steady.shardq("status", batch).returncode == ExitCode.OK


def test_a_failed_job_really_runs_again(steady: System) -> None:
    with steady.slow():
        before_it = steady.submit([long(f"before-{n}") for n in range(SLOTS)])
        wait_writing(steady, SLOTS)
        batch = steady.submit([short("fails", 30)])
        (job,) = steady.jobs(batch)
        with Database.open(steady.environment["SHARDQ_DATABASE_URL"]) as database:
            fault = OutcomeRow(job.id, 1, "head", JobState.FAILED, error_type="internal_error", error_message="a fault")
            record_outcomes(database, [fault])
        status = steady.shardq("status", batch)
        assert status.returncode == ExitCode.JOBS_FAILED
        assert "completed: not one job succeeded" in status.stdout
        assert steady.shardq("cancel", before_it, "--wait").returncode == ExitCode.OK

    before = time.time()
    result = steady.shardq("retry", batch, "--wait")
    assert result.returncode == ExitCode.OK, result.stderr
    (job,) = steady.jobs(batch)
    assert (job.state, job.attempt, job.completion_tokens) == (JobState.COMPLETED, 2, 30)
    assert job.started_at is not None
    assert job.started_at > before
    assert batch_of(steady, batch).status is BatchStatus.COMPLETED


def test_a_batch_expires_with_what_it_has(held: System, tmp_path: Path) -> None:
    names = [f"long-{n}" for n in range(SLOTS + 2)]
    batch = held.submit([short("quick"), *(long(name) for name in names)], "--expires-in", "1h")
    held.wait_for(batch, completed=1)
    wait_writing(held, SLOTS)
    expire_now(held, batch)
    held.wait_for(batch)
    row = batch_of(held, batch)
    assert row.status is BatchStatus.EXPIRED
    assert row.expires_at is not None
    assert row.expired_at is not None
    assert row.expires_at <= row.expired_at
    jobs = jobs_of(held, batch)
    assert jobs["quick"].state is JobState.COMPLETED
    assert {jobs[name].state for name in names} == {JobState.EXPIRED}

    errors = tmp_path / "errors.jsonl"
    results = held.shardq("results", batch, "--errors", str(errors))
    assert results.returncode == ExitCode.JOBS_FAILED
    stopped = lines_of(errors)
    assert {line["error"]["code"] for line in stopped.values()} == {"batch_expired"}
    assert any(line.get("shardq", {}).get("partial_text") for line in stopped.values())
    status = held.shardq("status", batch)
    assert status.returncode == ExitCode.JOBS_FAILED
    assert f"{len(names)} expired" in status.stdout


def test_a_line_with_a_deadline_of_its_own_expires_alone(steady: System) -> None:
    with steady.slow():
        batch = steady.submit([long("late", expires_in="2s"), long("fine", 60)])
        steady.wait_until(lambda: jobs_of(steady, batch)["late"].state is JobState.EXPIRED, "late job's end")
    steady.wait_for(batch)
    jobs = jobs_of(steady, batch)
    assert (jobs["late"].state, jobs["late"].error_type) == (JobState.EXPIRED, "deadline_exceeded")
    assert (jobs["fine"].state, jobs["fine"].completion_tokens) == (JobState.COMPLETED, 60)
    assert batch_of(steady, batch).status is BatchStatus.COMPLETED


def test_a_follower_gets_the_whole_text_once_although_the_head_is_killed(steady: System) -> None:
    with steady.slow():
        batch = steady.submit([long("followed", 400)])
        wait_writing(steady, 1)
        follower = follow(steady, f"{batch}-1")
        assert follower.stdout is not None
        first = json.loads(follower.stdout.readline())
        steady.kill_head()
    start_head(steady)
    pieces = [first, *map(json.loads, follower.communicate(timeout=PATIENCE_S)[0].splitlines())]
    job = jobs_of(steady, batch)["followed"]
    assert (job.state, job.completion_tokens, follower.returncode) == (JobState.COMPLETED, 400, ExitCode.OK)
    assert "".join(piece.get("text", "") for piece in pieces) == job.text
    assert len(first["text"]) < len(job.text or "")


def finished(jobs: list[JobRow]) -> list[float]:
    """When each ended, by the head's clock."""
    return sorted(job.finished_at for job in jobs if job.finished_at is not None)


def test_an_urgent_batch_comes_first_and_equally_urgent_ones_share_the_head(steady: System) -> None:
    # All of them stand there before the first job runs, or a fast machine would be done with one before the next.
    assert steady.stop("head") == 0
    try:
        first = steady.submit([short(f"first-{n}", 60) for n in range(24)])
        second = steady.submit([short(f"second-{n}", 60) for n in range(8)])
        urgent = steady.submit([short(f"urgent-{n}", 60) for n in range(6)], "--priority", "0")
    finally:
        start_head(steady)
    for batch, number in ((first, 24), (second, 8), (urgent, 6)):
        assert steady.wait_for(batch).counts.completed == number
    of_first, of_second = finished(steady.jobs(first)), finished(steady.jobs(second))
    # what stood in the queue, and what shared the slots, may have ended before
    assert sum(when > finished(steady.jobs(urgent))[-1] for when in of_first) >= 24 - WINDOW - 2 * SLOTS
    # as many as of the second, but for these
    between = [when for when in of_first if of_second[0] < when <= of_second[-1]]
    assert len(between) <= 8 + WINDOW + SLOTS
    assert of_first[-1] > of_second[-1]


def test_stored_results_need_no_head(steady: System) -> None:
    requests = [short("greedy", 20, temperature=0), short("seeded", 20)]
    first = steady.submit(requests)
    assert steady.wait_for(first).counts.completed == 2
    assert steady.stop("head") == 0
    try:
        # Another seed is another text, unless none is drawn.
        again = [{**requests[0], "seed": 8}, requests[1]]
        batch = steady.submit(again, "--reuse")
        status = steady.shardq("status", batch)
        assert status.returncode == ExitCode.OK, status.stderr
        assert "2 stored results" in status.stdout
        assert [job.reused_from for job in steady.jobs(batch)] == [f"{first}-1", f"{first}-2"]
        assert steady.texts(batch) == steady.texts(first)
    finally:
        start_head(steady)
