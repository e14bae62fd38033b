"""Ctrl-C at every stage of a command: real signals, held back by what the command waits for, never by time."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from cli.errors import ExitCode
from cli.processes import child_environment, shardq_argv
from storage.batches import list_batches
from storage.database import Database
from storage.states import BatchStatus, JobState
from tasks import keys
from tasks.heads import register_profile
from tests.cli_runner import PROFILE, PROMPTS, Shardq, numbered

#: what `end_jobs` lets jobs fail with is left out otherwise
AGAIN = ("retry", "--code", "context_length_exceeded")
LOG = "the database's log may hold what was in them, `shardq prune --vacuum` empties it"
NOTHING_QUEUED = "Interrupted: nothing was queued: the same command does it again"


@pytest.fixture
def run(tmp_path: Path, redis_url: str) -> Shardq:
    with redis.Redis.from_url(redis_url) as client:
        register_profile(client, "tiny", PROFILE)
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


@contextmanager
def started(run: Shardq, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process of its own."""
    values = {"SHARDQ_DATA_DIR": str(run.data_dir), "SHARDQ_DATABASE_URL": run.database_url, **environment}
    process = subprocess.Popen(
        shardq_argv(*arguments),
        env=child_environment(values),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupted(process: subprocess.Popen[bytes]) -> str:
    """What it says on stderr once Ctrl-C has ended it; its last line.

    As people do, again after a while: Python sees no signal that comes in the instant before it waits in the kernel.
    """
    for patience_s in (10, 60):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            _, said = process.communicate(timeout=patience_s)
            break
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert b"Traceback" not in said
    return said.decode().splitlines()[-1]


def batches(run: Shardq) -> list[tuple[str, BatchStatus]]:
    with run.database() as database:
        return [(row.id, row.status) for row in list_batches(database)]


class Doorman:
    """In front of the queue server: holds back everything said to it from the moment that `holds` is true."""

    def __init__(self, url: str, holds: Callable[[], bool]) -> None:
        parts = urlsplit(url)
        self._behind = (str(parts.hostname), int(parts.port or 0))
        self._holds = holds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        #: something is being held back
        self.held = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._behind)
                threading.Thread(target=self._carry, args=(client, server, self._holds), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, lambda: False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, holds: Callable[[], bool]) -> None:
        with suppress(OSError):  # either side has left
            while data := source.recv(65536):
                if holds():
                    self.held.set()
                    return
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextmanager
def doorman(url: str, holds: Callable[[], bool]) -> Iterator[Doorman]:
    one = Doorman(url, holds)
    try:
        yield one
    finally:
        one.close()


def test_while_the_input_is_read_nothing_is_queued(run: Shardq, redis_url: str, tmp_path: Path) -> None:
    fifo = tmp_path / "prompts.jsonl"
    os.mkfifo(fifo)
    with started(run, "submit", str(fifo), SHARDQ_BROKER_URL=redis_url) as process, fifo.open("wb") as prompts:
        prompts.write(PROMPTS)
        prompts.flush()
        assert interrupted(process) == NOTHING_QUEUED
    assert batches(run) == []


def test_while_the_queue_server_is_asked_nothing_is_queued(run: Shardq, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(PROMPTS)
    with (
        doorman(redis_url, lambda: True) as door,
        started(run, "submit", str(tmp_path / "f.jsonl"), SHARDQ_BROKER_URL=door.url) as process,
    ):
        assert door.held.wait(60)
        assert interrupted(process) == NOTHING_QUEUED
    assert batches(run) == []


def test_while_another_writes_to_the_database_nothing_is_queued(run: Shardq, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(PROMPTS)
    assert batches(run) == []  # makes the database
    other = sqlite3.connect(run.data_dir / "shardq.sqlite3", isolation_level=None, check_same_thread=False)
    locked = threading.Event()

    def lock() -> bool:
        # before anything is written, and for good
        if not locked.is_set():
            other.execute("BEGIN IMMEDIATE")
            locked.set()
        return False

    with (
        doorman(redis_url, lock) as door,
        started(run, "submit", str(tmp_path / "f.jsonl"), SHARDQ_BROKER_URL=door.url) as process,
    ):
        assert locked.wait(60)
        assert interrupted(process) == NOTHING_QUEUED
        other.close()
    assert batches(run) == []


@contextmanager
def signals_after(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Ctrl-C comes just after this function has done its work."""
    place, _, function = name.rpartition(".")
    with monkeypatch.context() as patch:
        real = getattr(resolve_name(place), function)

        def then_interrupted(*args: Any, **options: Any) -> Any:
            result = real(*args, **options)
            signal.raise_signal(signal.SIGINT)
            return result

        patch.setattr(name, then_interrupted)
        yield


def ends_with(run: Shardq, said: str, *arguments: str, stdin: bytes | None = None) -> None:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == ExitCode.INTERRUPTED, result.output
    assert result.stderr.endswith(f"Interrupted: {said}\n")


def test_jobs_that_were_being_written_are_taken_back(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    with signals_after(monkeypatch, "cli.client.submission.add_jobs"):
        result = run("submit", "-", stdin=numbered(1500))
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.stderr.splitlines()[-1] == NOTHING_QUEUED
    assert batches(run) == []


def test_a_batch_that_was_just_published_is_named(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    with signals_after(monkeypatch, "cli.client.submission.publish_batch"):
        result = run("submit", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.INTERRUPTED
    [(batch, status)] = batches(run)
    assert status == BatchStatus.IN_PROGRESS
    assert f"{batch} is queued and goes on without you" in result.stderr


@pytest.mark.parametrize("option", [(), ("--wait",), ("--quiet",)])
def test_after_publication_the_batch_is_named_and_how_to_go_on(
    run: Shardq, redis_url: str, tmp_path: Path, option: tuple[str, ...]
) -> None:
    (tmp_path / "f.jsonl").write_bytes(PROMPTS)
    with (
        doorman(redis_url, lambda: bool(batches(run)) and batches(run)[0][1] == BatchStatus.IN_PROGRESS) as door,
        started(run, "submit", str(tmp_path / "f.jsonl"), *option, SHARDQ_BROKER_URL=door.url) as process,
    ):
        assert door.held.wait(60)
        said = interrupted(process)
    [(batch, _)] = batches(run)
    assert said == (
        f"Interrupted: {batch} is queued and goes on without you: `shardq status {batch} --watch` shows its progress, "
        f"`shardq results {batch}` what came out, `shardq cancel {batch}` stops it"
    )


@pytest.mark.parametrize("command", ["submit", "retry", "status"])
def test_who_watches_a_batch_may_leave_it(run: Shardq, redis_url: str, tmp_path: Path, command: str) -> None:
    (tmp_path / "f.jsonl").write_bytes(PROMPTS)
    batch = "" if command == "submit" else run.submit()
    arguments = {
        "submit": ("submit", str(tmp_path / "f.jsonl"), "--wait", "--output", str(tmp_path / "out.jsonl")),
        "retry": (*AGAIN, batch, "--wait"),
        "status": ("status", batch, "--watch"),
    }[command]
    if command == "retry":
        run.end_jobs(batch, a=JobState.FAILED)
    with started(run, *arguments, SHARDQ_BROKER_URL=redis_url) as process:
        assert process.stderr is not None
        while b" done, " not in process.stderr.readline():  # the first line of its progress
            assert process.poll() is None
        said = interrupted(process)
    [(batch, _)] = batches(run)
    assert f"{batch} is queued and goes on without you" in said


def test_who_cancels_a_batch_may_leave_it(run: Shardq, redis_url: str) -> None:
    batch = run.submit()
    with (
        doorman(redis_url, lambda: True) as door,
        started(run, "cancel", batch, "--wait", SHARDQ_BROKER_URL=door.url) as process,
    ):
        assert door.held.wait(60)
        said = interrupted(process)
    assert said == f"Interrupted: what was decided stands, and stops without you: `shardq status {batch}`"


def test_a_retry_says_whether_it_was_in_time(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.FAILED)
    with monkeypatch.context() as patch:
        patch.setattr("cli.client.retrying.retry_batch", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        said = f"{batch} has ended: `shardq status {batch}` says how, `shardq results {batch}` what came out"
        ends_with(run, said, *AGAIN, batch)
    with signals_after(monkeypatch, "cli.client.retrying.retry_batch"):
        result = run(*AGAIN, batch)
    assert result.exit_code == ExitCode.INTERRUPTED
    assert f"{batch} is queued and goes on without you" in result.stderr


def test_a_deletion_names_what_is_still_there(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [run.submit() for _ in range(2)]
    for batch in ids:
        run.end_jobs(batch)
    monkeypatch.setattr("cli.confirmation.is_terminal", lambda: True)
    ends_with(run, "nothing was deleted", "delete", *ids, stdin=b"")
    with signals_after(monkeypatch, "cli.commands.retention.delete_batch"):
        ends_with(run, f"deleted 1 of 2 batches; still there: {ids[1]}; {LOG}", "delete", *ids, "--yes")
    with signals_after(monkeypatch, "storage.retention.delete_batch"):
        ends_with(run, f"deleted 1 batch with 2 jobs; {LOG}", "prune", "--older-than", "0s", "--yes")
    assert batches(run) == []


def test_records_that_were_being_thrown_away_are_counted(
    run: Shardq, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for number in range(3):
            client.xadd(keys.REJECTED, {"kind": "outcome", "json": f"{number}"})
        with signals_after(monkeypatch, "cli.commands.rejected.remove"):
            ends_with(run, "2 records left of 3", "rejected", "--drop", "--yes")
        assert client.xlen(keys.REJECTED) == 2
    with signals_after(monkeypatch, "cli.commands.rejected.take_in"):
        left = "what was recorded stays so, the rest waits: the same command goes on"
        ends_with(run, left, "rejected", "--apply")


def test_accounts_that_were_made_are_told_of(run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "server"
    assert run("init-server", str(place), "--host", "queue.example.org").exit_code == ExitCode.OK
    with signals_after(monkeypatch, "cli.hosting.accounts.ServerDirectory.rotate"):
        left = f"what was told is done; `shardq server accounts {place}` shows the rest, do that again"
        ends_with(run, left, "server", "rotate", str(place), "head")


def test_a_backup_leaves_no_part_of_itself(run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.submit()
    (tmp_path / "copies").mkdir()
    target = tmp_path / "copies" / "b.sqlite3"
    with signals_after(monkeypatch, "storage.retention.copy_sqlite"):
        ends_with(run, f"no backup was written to {target}", "backup", str(target))
    assert not any(target.parent.iterdir())


def test_results_that_were_being_written_leave_what_was_there(
    run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.end_jobs(batch := run.submit())
    target = tmp_path / "out.jsonl"
    target.write_text("before")
    with signals_after(monkeypatch, "cli.result_files.result_line"):
        said = f"{target} was not written: what it held before stays"
        ends_with(run, said, "results", batch, "--output", str(target))
        ends_with(run, "not all lines were printed", "results", batch, "--json")
    assert target.read_text() == "before"


def test_files_that_were_being_made_are_told_of(run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with signals_after(monkeypatch, "cli.commands.init_server.write_files"):
        ends_with(run, "nothing was written", "init-server", str(tmp_path / "server"), "--host", "queue.example.org")
    assert not any((tmp_path / "server").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("cli.model_files.prepare", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        said = "org/model is not prepared: the same command goes on with the files that have come"
        ends_with(run, said, "models", "prepare", "org/model")


def test_what_only_looks_leaves_nothing_behind(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> Database:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr("storage.database.Database.open", interrupt)
    ends_with(run, "nothing was changed", "list")


def test_a_command_that_had_done_its_work_says_so(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = run.submit()
    with signals_after(monkeypatch, "storage.database.Database.close"):
        ends_with(run, "the work was done", "cancel", batch)
    assert batches(run) == [(batch, BatchStatus.CANCELLED)]


@pytest.mark.parametrize(
    ("arguments", "at_work", "left"),
    [
        (("bookkeeper",), b"bookkeeper started with database", "their results wait there for a bookkeeper"),
        (("flower", "--port", "0"), b"the dashboard is at", "jobs go on without the page"),
    ],
)
def test_processes_that_serve_end_in_order_with_the_status_of_ctrl_c(
    run: Shardq, redis_url: str, arguments: tuple[str, ...], at_work: bytes, left: str
) -> None:
    with started(run, *arguments, SHARDQ_BROKER_URL=redis_url) as process:
        assert process.stderr is not None
        while at_work not in process.stderr.readline():
            assert process.poll() is None
        assert left in interrupted(process)
