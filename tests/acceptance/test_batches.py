"""A batch from file to results through real processes, undisturbed and disturbed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.errors import ExitCode
from tests.acceptance.blocks import run_blocks, run_python
from tests.acceptance.system import System
from tests.documents import ROOT
from tests.integration.test_fronts_recovery import front_pids

#: jobs that end while the others, over the long link, have hardly begun
NUM_BRIEF = 2
#: enough work to be in the middle of it when something is killed
LONG = [
    {
        "custom_id": f"job-{n}",
        "prompt": f"{n} bottles on the wall",
        "max_tokens": 4 if n < NUM_BRIEF else 120,
        "ignore_eos": True,
        "temperature": n % 2,
        "seed": n,
    }
    for n in range(12)
]


def short(count: int, **parameters: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"job-{n}", "prompt": f"prompt {n}", "max_tokens": 8, **parameters} for n in range(count)]


def test_a_file_goes_in_and_results_come_out(whole_system: System, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    chat = {"custom_id": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    rows = [*short(5, temperature=0), chat]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = whole_system.shardq("submit", str(prompts), "--wait", "--output", str(out))
    assert result.returncode == ExitCode.OK, result.stderr
    assert "6/6 done, 0 failed" in result.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    for job in whole_system.jobs(result.stdout.split()[0]):
        assert job.completion_tokens is not None
        assert 1 <= job.completion_tokens <= 8
        assert job.finish_reason in ("stop", "length")
        assert job.wire_bytes_up
        assert job.ttft_s is not None


@pytest.mark.parametrize(("document", "least"), [("README.md", 1), ("docs/quickstart.md", 5)])
def test_every_shell_block_of_a_document_runs_but_those_that_say_why_not(
    whole_system: System, tmp_path: Path, document: str, least: int
) -> None:
    assert run_blocks(ROOT / document, whole_system, tmp_path) >= least


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_python_blocks_of_a_document_run_in_order_as_one_script(
    whole_system: System, tmp_path: Path, document: str
) -> None:
    run_python(ROOT / document, whole_system, tmp_path)


def test_one_bad_job_fails_alone(whole_system: System) -> None:
    too_long = {"custom_id": "long", "prompt": "x" * 1000, "max_tokens": 8}
    batch = whole_system.submit([*short(3), too_long])
    report = whole_system.wait_for(batch)
    assert (report.counts.completed, report.counts.failed) == (3, 1)
    (failed,) = [job for job in whole_system.jobs(batch) if job.custom_id == "long"]
    assert failed.error_type == "context_length_exceeded"
    assert whole_system.shardq("status", batch).returncode == ExitCode.JOBS_FAILED


@pytest.fixture(scope="session")
def undisturbed(shared_system: System) -> dict[str, str | None]:
    """The texts of `LONG` when nothing happens."""
    shared_system.start_all()
    batch = shared_system.submit(LONG)
    assert shared_system.wait_for(batch).counts.completed == len(LONG)
    return shared_system.texts(batch)


def test_a_killed_tail_costs_no_job_and_changes_no_text(
    undisturbed: dict[str, str | None], whole_system: System
) -> None:
    with whole_system.slow():
        batch = whole_system.submit(LONG)
        whole_system.wait_for(batch, completed=NUM_BRIEF)
        whole_system.kill_tail()
    assert whole_system.progress(batch).counts.num_open > 0
    whole_system.start_tail()
    assert whole_system.wait_for(batch).counts.completed == len(LONG)
    assert whole_system.texts(batch) == undisturbed


def test_a_killed_head_costs_no_job_and_changes_no_text(
    undisturbed: dict[str, str | None], whole_system: System
) -> None:
    with whole_system.slow():
        batch = whole_system.submit(LONG)
        whole_system.wait_for(batch, completed=NUM_BRIEF)
        whole_system.kill_head()
    assert whole_system.progress(batch).counts.num_open > 0
    whole_system.start_head()
    assert whole_system.wait_for(batch).counts.completed == len(LONG)
    assert whole_system.texts(batch) == undisturbed


def test_a_head_that_was_frozen_while_another_took_its_id_ends_and_costs_no_job(
    undisturbed: dict[str, str | None], whole_system: System
) -> None:
    frozen = [whole_system.pid("head"), *front_pids(whole_system.pid("head"))]
    try:
        with whole_system.slow():
            batch = whole_system.submit(LONG)
            whole_system.wait_for(batch, completed=NUM_BRIEF)
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
        whole_system.start_head("second", **{"head-id": "head"})
        whole_system.wait_until(lambda: not whole_system.heads(), "lapsed presence")
        whole_system.wait_until(lambda: bool(whole_system.heads()), "second head")
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert whole_system.wait_ended("head") != ExitCode.OK
    assert "another head has taken the id 'head'" in whole_system.logs()
    assert whole_system.wait_for(batch).counts.completed == len(LONG)
    assert whole_system.texts(batch) == undisturbed
    assert whole_system.stop("second") == 0


def test_a_killed_bookkeeper_costs_no_job(whole_system: System) -> None:
    with whole_system.slow():
        batch = whole_system.submit(LONG)
        whole_system.wait_until(lambda: any(head.running for head in whole_system.heads()), "running jobs")
        whole_system.kill("bookkeeper")
    whole_system.wait_until(lambda: not any(head.running for head in whole_system.heads()), "idle head")
    whole_system.start_bookkeeper()
    assert whole_system.wait_for(batch).counts.completed == len(LONG)
    assert all(job.duplicate_records == 0 for job in whole_system.jobs(batch))


def test_workers_stop_in_order_and_a_head_without_a_tail_takes_nothing_and_says_so(
    undisturbed: dict[str, str | None], whole_system: System
) -> None:
    with whole_system.slow():
        batch = whole_system.submit(LONG)
        whole_system.wait_for(batch, completed=1)
        assert whole_system.stop("head") == 0
        assert whole_system.stop("tail") == 0
    left = whole_system.progress(batch).counts
    assert left.failed == 0
    assert left.num_open > 0

    whole_system.start_head()
    no_tail = "no tail is there (start `shardq tail`)"
    whole_system.wait_until(
        lambda: [head.obstacle for head in whole_system.heads()] == [no_tail], "head without a tail"
    )
    second = whole_system.submit(short(3))
    queued = ["queued"] * 3
    whole_system.wait_until(lambda: [job.state for job in whole_system.jobs(second)] == queued, "queued jobs")
    status = whole_system.shardq("status", second)
    assert status.returncode == ExitCode.UNFINISHED
    assert f"head head takes no jobs: {no_tail}" in status.stderr
    assert [job.state for job in whole_system.jobs(second)] == queued

    whole_system.start_tail()
    assert whole_system.wait_for(second).counts.completed == 3
    assert whole_system.wait_for(batch).counts.completed == len(LONG)
    assert whole_system.texts(batch) == undisturbed
