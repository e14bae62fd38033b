"""The bookkeeper as a process: killed, stopped, without its servers."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.batches import get_batch
from storage.jobs import iterate_results
from storage.states import BatchStatus, JobState
from tasks import keys, queues
from tasks.bookkeeper import run
from tasks.errors import QueueRefused
from tasks.results import publish_outcome
from tests.bookkeeping import MODEL, Office, at_work, open_office, outcome, submit

ROOT = Path(__file__).parents[2]


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def num_recorded(office: Office, batch: str) -> int:
    return get_batch(office.database, batch).counts.num_ended


def test_each_record_has_its_effect_once_through_kill_9_of_the_recorder(tmp_path: Path) -> None:
    number = 2000
    with open_office(tmp_path, persistent=True, window_min_jobs=number) as office:
        batch = submit(office.database, number)
        ids = [job.id for job in iterate_results(office.database, batch)]
        for job_id in ids:
            publish_outcome(office.client, outcome(job_id, text=f"text of {job_id}"))
        arguments = ("-m", "tests.integration.recorder_process", office.server.url, office.database_url)
        for share in (0.1, 0.4, 0.7):
            with process(*arguments) as child:
                wait_for(lambda: num_recorded(office, batch) >= share * number)  # noqa: B023
                child.send_signal(signal.SIGKILL)
                child.wait()
        assert num_recorded(office, batch) < number
        with process(*arguments):
            wait_for(lambda: office.client.xlen(keys.RESULTS) == 0)
        rows = list(iterate_results(office.database, batch))
        assert [row.text for row in rows] == [f"text of {job_id}" for job_id in ids]
        assert {row.state for row in rows} == {JobState.COMPLETED}
        # what was recorded but not settled at a kill comes again: at most one transaction each time
        assert sum(row.duplicate_records for row in rows) <= 3 * 200
        assert get_batch(office.database, batch).status is BatchStatus.COMPLETED


def test_a_bookkeeper_outlives_its_queue_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_office(tmp_path, persistent=True) as office, at_work(office):
        wait_for(lambda: office.client.exists(keys.BOOKKEEPER) == 1)
        port = office.server.port
        office.server.stop()
        submit(office.database, 3)
        wait_for(lambda: "trying again" in caplog.text)
        office.server.port = port
        office.server.start()
        wait_for(lambda: queues.num_waiting(office.client, MODEL) == 3)
        wait_for(lambda: "works again" in caplog.text)


def test_a_bookkeeper_outlives_a_locked_database(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.BUSY_TIMEOUT_MS", 200)
    with open_office(tmp_path) as office:
        batch = submit(office.database, 2)
        lock = sqlite3.connect(tmp_path / "jobs.sqlite3", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        with at_work(office):
            for job in iterate_results(office.database, batch):
                publish_outcome(office.client, outcome(job.id))
            wait_for(lambda: "locked" in caplog.text)
            lock.execute("ROLLBACK")
            wait_for(lambda: num_recorded(office, batch) == 2)
        lock.close()
        assert [job.duplicate_records for job in iterate_results(office.database, batch)] == [0, 0]


def test_sigterm_ends_it_cleanly_and_frees_its_place(tmp_path: Path) -> None:
    with open_office(tmp_path) as office:
        code = (
            "from storage.database import Database; from tasks.bookkeeper import run;"
            "from tasks.settings import BookkeeperSettings as S; from cli.interruption import stop_on_signals\n"
            "with stop_on_signals('') as stop:"
            f"    run(Database.open({office.database_url!r}), S(broker_url={office.server.url!r}), stop)"
        )
        with process("-c", code) as child:
            wait_for(lambda: office.client.exists(keys.BOOKKEEPER) == 1)
            child.send_signal(signal.SIGTERM)
            assert child.wait(10) == 0
        assert office.client.exists(keys.BOOKKEEPER) == 0


def test_a_queue_server_that_will_not_let_it_in_ends_it_with_a_reason(tmp_path: Path) -> None:
    with open_office(tmp_path) as office:
        office.client.config_set("requirepass", "secret")
        with pytest.raises(QueueRefused, match="refuses us"):
            run(office.database, office.settings, threading.Event())


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
