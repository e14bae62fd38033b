"""`delete`, `prune` and `backup`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cli.errors import ExitCode
from storage import retention
from storage.database import Database
from storage.errors import DiskFull
from storage.jobs import iterate_results
from storage.states import JobState
from tasks.heads import register_profile
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
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.confirmation.is_terminal", lambda: True)


def ids(run: Shardq) -> list[str]:
    return [row["id"] for row in json.loads(run("list", "--json").stdout)]


def ended(run: Shardq, *options: str) -> str:
    batch = run.submit(PROMPTS, *options)
    run.end_jobs(batch)
    return batch


def test_a_deleted_batch_is_gone_and_its_name_is_free(run: Shardq) -> None:
    batch, other = ended(run, "--name", "nightly"), ended(run)
    result = run("delete", "nightly", "--yes")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout == "deleted 1 batch with 2 jobs\n"
    assert f"{batch} (nightly): completed, 2 jobs" in result.stderr
    assert ids(run) == [other]
    assert run.submit(PROMPTS, "--name", "nightly") != batch


def test_several_batches_are_deleted_each_once(run: Shardq) -> None:
    first, second = ended(run, "--name", "nightly"), ended(run)
    result = run("delete", first, "nightly", second, "--yes", "--json")
    assert json.loads(result.stdout) == [{"id": first, "jobs": 2}, {"id": second, "jobs": 2}]
    assert ids(run) == []


def test_nothing_is_deleted_without_a_yes_where_nobody_can_be_asked(run: Shardq) -> None:
    batch = ended(run)
    result = run("delete", batch)
    assert result.exit_code == ExitCode.USAGE
    assert "--yes" in error_of(result)
    assert ids(run) == [batch]


def test_on_a_terminal_one_is_asked(run: Shardq, on_a_terminal: None) -> None:
    batch = ended(run)
    refused = run("delete", batch, stdin=b"n\n")
    assert refused.exit_code == ExitCode.ERROR
    assert "it cannot be undone" in refused.stderr
    assert ids(run) == [batch]
    assert run("delete", batch, stdin=b"y\n").exit_code == ExitCode.OK
    assert ids(run) == []


def test_an_open_batch_is_not_deleted_and_nothing_beside_it(run: Shardq) -> None:
    done, going = ended(run), run.submit()
    result = run("delete", done, going, "--yes")
    assert result.exit_code == ExitCode.ERROR
    assert f"`shardq cancel {going} --wait`" in error_of(result)
    assert set(ids(run)) == {done, going}


def test_a_batch_that_does_not_exist_is_one_line(run: Shardq) -> None:
    assert "no batch 'nothing'" in error_of(run("delete", "nothing", "--yes"))


def test_old_batches_are_pruned_and_young_and_open_ones_stay(run: Shardq) -> None:
    old = ended(run)
    with run.database() as database, database.write() as connection:
        connection.exec_driver_sql(f"UPDATE batch SET completed_at = {time.time() - 3 * 86_400}")
    young, going = ended(run), run.submit()
    dry = run("prune", "--older-than", "2d", "--dry-run")
    assert dry.stdout == "would delete 1 batch with 2 jobs\n"
    assert len(ids(run)) == 3
    assert run("prune", "--older-than", "2d").exit_code == ExitCode.USAGE
    result = run("prune", "--older-than", "2d", "--yes", "--json")
    assert json.loads(result.stdout) == {"dry_run": False, "batches": [{"id": old, "jobs": 2}]}
    assert set(ids(run)) == {young, going}


def test_what_was_deleted_is_overwritten_also_in_the_log(run: Shardq) -> None:
    run.end_jobs(run.submit(b'{"prompt": "forget me"}\n', "--name", "secret"))
    files = list(run.data_dir.iterdir())
    assert any(b"forget me" in path.read_bytes() for path in files)
    result = run("delete", "secret", "--yes")
    assert "still holds" not in result.stderr
    assert not any(b"forget me" in path.read_bytes() for path in run.data_dir.iterdir())


def test_a_full_disk_deletes_without_overwriting_and_says_so(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_room(database: Database, *arguments: Any, overwrite: bool = True) -> Any:
        if overwrite:
            raise DiskFull("the disk is full")
        return wanted(database, *arguments, overwrite=overwrite)

    for name, command in (("delete_batch", ["delete", "nightly"]), ("prune", ["prune", "--older-than", "0s"])):
        wanted = getattr(retention, name)
        monkeypatch.setattr(f"cli.commands.retention.{name}", short_of_room)
        ended(run, "--name", "nightly")
        result = run(*command, "--yes")
        assert result.exit_code == ExitCode.OK
        assert "no room to overwrite" in result.stderr
        assert ids(run) == []


def test_a_file_gives_its_free_space_back(run: Shardq) -> None:
    run.end_jobs(run.submit(numbered(2000), "--name", "large"))
    kept = ended(run)
    assert run("delete", "large", "--yes").exit_code == ExitCode.OK
    result = json.loads(run("prune", "--vacuum", "--json").stdout)
    assert result["bytes_after"] < result["bytes_before"] / 4
    assert result["bytes_after"] == (run.data_dir / "shardq.sqlite3").stat().st_size
    assert run("prune", "--older-than", "30d", "--vacuum").stdout.startswith("the file had ")
    assert ids(run) == [kept]


def test_nothing_to_prune_needs_no_yes(run: Shardq) -> None:
    ended(run)
    result = run("prune", "--older-than", "30d")
    assert result.exit_code == ExitCode.OK
    assert "no batch ended more than 30d00h ago" in result.stderr


def test_an_age_must_be_named(run: Shardq) -> None:
    assert "--older-than 30d" in error_of(run("prune"))
    assert "expected a duration" in error_of(run("prune", "--older-than", "yesterday"))


def test_a_backup_holds_the_same_and_is_never_written_over(run: Shardq, tmp_path: Path) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED)
    path = tmp_path / "copy.sqlite3"
    result = run("backup", str(path))
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout.startswith(f"{path} (")
    with Database.open(f"sqlite:///{path}") as copy:
        assert {job.custom_id: job.state for job in iterate_results(copy, batch)} == {"a": "failed", "b": "completed"}
    assert "copy.sqlite3" in error_of(run("backup", str(path)))


def test_a_backup_is_no_stream(run: Shardq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("backup", "-")
    assert result.exit_code == ExitCode.USAGE
    assert "not a stream" in error_of(result)
    assert not Path("-").exists()


def test_a_backup_that_cannot_be_written_is_one_line(run: Shardq, tmp_path: Path) -> None:
    ended(run)
    assert run("backup", str(tmp_path / "missing" / "copy.sqlite3")).exit_code == ExitCode.ERROR
