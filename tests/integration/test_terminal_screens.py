"""What people see on a real terminal, as it is redrawn and resized, of commands that go on for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cli.errors import ExitCode
from storage.batches import list_batches
from storage.outcomes import record_outcomes
from storage.states import JobState
from tasks import keys
from tasks.heads import HeadInfo, register_profile
from tests.bookkeeping import head_info
from tests.cli_runner import PROFILE, Shardq, numbered, outcome
from tests.integration.test_cli_follow import Head
from tests.live_figures import FIGURES
from tests.terminal import Terminal, on_a_terminal

SIZES = [(80, 24), (130, 24)]
HEAD = replace(head_info("gpu-a", slots=16, live=("a.1", "a.2", "a.3")), figures=FIGURES)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        register_profile(connection, "tiny", PROFILE)
        tell(connection, HEAD)
        yield connection


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


@pytest.fixture
def environment(run: Shardq, redis_url: str) -> dict[str, str]:
    return {
        "SHARDQ_DATA_DIR": str(run.data_dir),
        "SHARDQ_DATABASE_URL": run.database_url,
        "SHARDQ_BROKER_URL": redis_url,
    }


def tell(client: redis.Redis, head: HeadInfo) -> None:
    """A head that lives for as long as a test."""
    client.set(keys.head(head.head_id), head.to_json())
    client.sadd(keys.HEADS, head.head_id)


def end(run: Shardq, batch: str, **ends: JobState) -> None:
    """Record these ends, as the bookkeeper does."""
    jobs = run.jobs(batch)
    with run.database() as database:
        record_outcomes(database, [outcome(jobs[name.replace("_", "-")], state) for name, state in ends.items()])


def the_only_batch(run: Shardq) -> str:
    with run.database() as database:
        (row,) = list_batches(database)
    return row.id


def assert_one_frame(lines: list[str], columns: int) -> None:
    """The tables of `top` once, each in its place, and nothing of an earlier frame."""
    assert all(len(line) <= columns for line in lines)
    headers = [line.split()[0] for line in lines if line and line.split()[-1] in ("MODEL", "HEAD")]
    assert headers == ["HEAD", "TAIL", "QUEUED"]
    assert sum("tok/s" in line for line in lines) == 1
    assert sum(line.startswith("gpu-a ") for line in lines) == 1
    assert [line for line in lines if line][-1] == "q ends"


@pytest.mark.parametrize(("columns", "height"), SIZES)
def test_top_draws_each_frame_over_the_last_one(
    environment: dict[str, str], client: redis.Redis, columns: int, height: int
) -> None:
    with on_a_terminal(environment, "top", "--interval-s", "0.5", columns=columns, lines=height) as terminal:
        for running in (4, 5, 6):
            tell(client, replace(HEAD, running=running))
            assert_one_frame(terminal.wait_for(lambda lines, n=running: f"{n}/16" in "\n".join(lines)), columns)
        for other, lower in ((210 - columns, 30), (columns, 18)):
            terminal.resize(other, lower)
            running += 1
            tell(client, replace(HEAD, running=running))
            assert_one_frame(terminal.wait_for(lambda lines, n=running: f"{n}/16" in "\n".join(lines)), other)
        terminal.press("q")
        assert terminal.end() == ExitCode.OK


def test_top_shows_what_fits_of_many_heads(environment: dict[str, str], client: redis.Redis) -> None:
    for number in range(30):
        tell(client, replace(HEAD, head_id=f"gpu-{number:02}"))
    with on_a_terminal(environment, "top", "--interval-s", "0.5") as terminal:
        lines = terminal.wait_for(lambda lines: "q ends" in lines)
        assert sum("more" in line for line in lines) == 2
        terminal.press("\x03")
        assert terminal.end() == ExitCode.INTERRUPTED


def progress_lines(terminal: Terminal) -> list[str]:
    return [line for line in terminal.everything() if " failed" in line and " running" in line]


@pytest.mark.parametrize(("columns", "height"), SIZES)
@pytest.mark.parametrize("command", ["submit", "status"])
def test_progress_stays_on_one_line_with_failures_and_resized(
    environment: dict[str, str], run: Shardq, tmp_path: Path, command: str, columns: int, height: int
) -> None:
    (tmp_path / "f.jsonl").write_bytes(numbered(112))
    arguments = ("submit", str(tmp_path / "f.jsonl"), "--wait")
    if command == "status":
        arguments = ("status", run.submit(numbered(112)), "--watch")
    with on_a_terminal(environment, *arguments, columns=columns, lines=height) as terminal:
        terminal.wait_for(lambda lines: any("0/112  0 failed" in line for line in lines))
        batch = the_only_batch(run)
        end(
            run, batch, job_1=JobState.FAILED, job_2=JobState.FAILED, job_3=JobState.COMPLETED, job_4=JobState.CANCELLED
        )
        terminal.wait_for(lambda lines: any("4/112  2 failed  1 cancelled" in line for line in lines))
        (line,) = progress_lines(terminal)
        assert "ETA" in line
        assert len(line) <= columns
        terminal.resize(210 - columns, height)
        end(run, batch, job_5=JobState.FAILED)
        terminal.wait_for(lambda lines: any("5/112  3 failed" in line for line in lines))
        assert sum("ETA" in line for line in progress_lines(terminal)) == 1
        run.end_jobs(batch)
        assert terminal.end() == ExitCode.JOBS_FAILED
        (line,) = progress_lines(terminal)
        assert line.split()[-2] == "took"
        assert "112/112  3 failed" in line
        assert sum("108 completed" in line for line in terminal.everything()) == 1


def test_who_leaves_is_told_below_the_progress(environment: dict[str, str], run: Shardq) -> None:
    batch = run.submit(numbered(3))
    with on_a_terminal(environment, "status", batch, "--watch") as terminal:
        terminal.wait_for(lambda lines: any("0/3  0 failed" in line for line in lines))
        terminal.press("\x03")
        assert terminal.end() == ExitCode.INTERRUPTED
        lines = [line for line in terminal.everything() if line]
        assert len(progress_lines(terminal)) == 1
        assert any(line.startswith(f"Interrupted: {batch} is queued and goes on without you") for line in lines)


@pytest.mark.parametrize(("columns", "height"), SIZES)
def test_a_followed_text_stands_once_with_remarks_on_lines_of_their_own(
    environment: dict[str, str], run: Shardq, client: redis.Redis, columns: int, height: int
) -> None:
    batch = run.submit(numbered(1))
    with (
        closing(Head(client, f"{batch}-1.1")) as head,
        on_a_terminal(environment, "follow", f"{batch}-1", columns=columns, lines=height) as terminal,
    ):
        terminal.wait_for(lambda lines: any(line.startswith("no bookkeeper runs") for line in lines))
        run.start_jobs(batch, "job-1")
        assert head.woken.wait(30)
        long = "word " * 40
        head.say(f"Größe, {long}")
        terminal.wait_for(lambda lines: "".join(lines).count("word") == 40)
        terminal.resize(210 - columns, height)
        run.end_jobs(batch)
        assert terminal.end() == ExitCode.OK
        text = "".join(terminal.everything())
        assert text.count("Größe, word") == 1
