"""Jobs are queued only from the database that the bookkeeper keeps, and an outcome that it does not know is kept."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.batches import get_batch
from storage.database import Database
from storage.identity import read_identity
from storage.job_records import Fate
from storage.jobs import iterate_results
from storage.retention import backup, delete_batch
from storage.states import BatchStatus
from storage.stops import cancel_batch, pending_stops, settle_stops
from tasks import kept_database, keys, results
from tasks.bookkeeper import Bookkeeper
from tasks.errors import OtherDatabase
from tasks.feeder import feed_once
from tasks.kept_database import MARK_S, KeptDatabase, difference, published
from tasks.rejected import num_rejected, rejected, take_in
from tests.bookkeeping import Office, open_office, outcome, submit

GO_ON = threading.Event()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path) as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Database]:
    """Another database, of somebody who submits to the same queue server."""
    with Database.open(f"sqlite:///{tmp_path / 'other.sqlite3'}") as database:
        yield database


def turn(office: Office, bookkeeper: Bookkeeper, seconds: float = 0.0) -> None:
    office.clock.now += seconds
    bookkeeper.turn(GO_ON, block_ms=0)


@contextmanager
def copy_of(office: Office, name: str) -> Iterator[Database]:
    """The file as `cp` copies it from a machine that is idle."""
    with office.database.write() as connection:
        connection.exec_driver_sql("UPDATE counter SET value = value")
    path = office.directory / name
    for ending in ("", "-wal"):
        shutil.copy(f"{office.directory / 'jobs.sqlite3'}{ending}", f"{path}{ending}")
    with Database.open(f"sqlite:///{path}") as database:
        yield database


def test_nothing_is_queued_from_a_database_that_the_bookkeeper_does_not_keep(office: Office, other: Database) -> None:
    turn(office, office.bookkeeper())
    batch = submit(other, 2)
    with pytest.raises(OtherDatabase) as refusal:
        feed_once(other, office.settings)
    for database in (office.database, other):
        assert read_identity(database).id in str(refusal.value)
        assert database.place in str(refusal.value)
    assert get_batch(other, batch).counts.waiting == 2


def test_the_kept_database_is_known_after_its_bookkeeper_and_until_the_next_one_has_another(
    office: Office, other: Database
) -> None:
    first = office.bookkeeper()
    turn(office, first)
    first.close()
    with pytest.raises(OtherDatabase, match="the bookkeeper that ran last kept"):
        feed_once(other, office.settings)
    assert feed_once(office.database, office.settings) == 0

    office.database, mine = other, office.database
    turn(office, office.bookkeeper())
    assert difference(office.client, other) is None
    with pytest.raises(OtherDatabase, match="the bookkeeper keeps"):
        feed_once(mine, office.settings)


def test_without_a_word_from_any_bookkeeper_jobs_are_queued(office: Office) -> None:
    submit(office.database, 2)
    assert feed_once(office.database, office.settings) == 2
    office.client.set(keys.DATABASE, "of another version")
    assert published(office.client) is None


def test_a_copy_beside_the_kept_database_is_found_out(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    backup(office.database, office.directory / "backup.sqlite3")
    with Database.open(f"sqlite:///{office.directory / 'backup.sqlite3'}") as copy:
        assert "is a copy of it" in (difference(office.client, copy) or "")
    with copy_of(office, "copy.sqlite3") as copy:
        turn(office, bookkeeper, MARK_S)
        assert "is a copy of it" in (difference(office.client, copy) or "")
    assert difference(office.client, office.database) is None


def test_a_backup_in_the_place_of_the_database_is_the_database(office: Office) -> None:
    first = office.bookkeeper()
    turn(office, first)
    first.close()
    backup(office.database, office.directory / "backup.sqlite3")
    with Database.open(f"sqlite:///{office.directory / 'backup.sqlite3'}") as restored:
        assert difference(office.client, restored) is None
        office.database = restored
        turn(office, office.bookkeeper())
        assert difference(office.client, restored) is None


def test_a_mark_that_could_not_be_published_is_published_before_there_is_another(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_database.publish(office.client, office.database)
    with monkeypatch.context() as patch:
        patch.setattr(office.client, "eval", lambda *_: None)
        for _ in range(3):
            kept_database.publish(office.client, office.database)
    office.client.set(keys.BOOKKEEPER, "at work")
    assert difference(office.client, office.database) is None
    kept_database.publish(office.client, office.database)
    kept = published(office.client)
    assert isinstance(kept, KeptDatabase)
    assert kept.mark == read_identity(office.database).mark


def test_a_second_bookkeeper_says_whether_it_has_another_database(
    office: Office, other: Database, caplog: pytest.LogCaptureFixture
) -> None:
    turn(office, office.bookkeeper())
    stopped = threading.Event()
    stopped.set()
    office.bookkeeper().turn(stopped)
    assert "another bookkeeper is at work; this one waits" in caplog.text
    office.database, mine = other, office.database
    office.bookkeeper().turn(stopped)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "another bookkeeper is at work, with another database" in error
    assert read_identity(mine).id in error
    assert read_identity(other).id in error


def test_an_outcome_that_the_database_does_not_know_is_kept_and_never_called_recorded(
    office: Office, other: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    batch, foreign = submit(office.database, 1), submit(other, 2)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    for job in (f"{foreign}-1", f"{batch}-1", f"{foreign}-2"):
        results.publish_outcome(office.client, outcome(job))
    turn(office, bookkeeper, 1)

    recorded = [vars(r)["job"] for r in caplog.records if r.getMessage() == "outcome recorded"]
    assert recorded == [f"{batch}-1"]
    assert bookkeeper.tally.models()["tiny"].ends()["stop"] == 1
    assert office.client.xlen(keys.RESULTS) == 0
    assert num_rejected(office.client) == (2, 0)
    kept = [item.outcome for item in rejected(office.client)]
    assert kept == [outcome(f"{foreign}-1"), outcome(f"{foreign}-2")]


def test_kept_outcomes_go_into_the_database_that_has_their_jobs_and_the_others_stay(
    office: Office, other: Database
) -> None:
    foreign = submit(other, 2)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    for job in (f"{foreign}-1", "batch_of_nobody-1", f"{foreign}-2"):
        results.publish_outcome(office.client, outcome(job))
    office.client.xadd(keys.RESULTS, {"kind": "outcome", "json": "{"})
    turn(office, bookkeeper, 1)
    assert take_in(office.client, office.database)[Fate.UNKNOWN] == 3

    assert take_in(office.client, other) == {Fate.APPLIED: 2, Fate.UNKNOWN: 1}

    assert get_batch(other, foreign).status is BatchStatus.COMPLETED
    assert [job.text for job in iterate_results(other, foreign)] == ["there", "there"]
    assert [item.outcome and item.outcome.job for item in rejected(office.client)] == ["batch_of_nobody-1", None]
    assert take_in(office.client, other) == {Fate.UNKNOWN: 1}


def test_a_bookkeeper_that_comes_with_another_database_takes_in_what_was_put_aside_for_it(
    office: Office, other: Database
) -> None:
    foreign = submit(other, 1)
    first = office.bookkeeper()
    turn(office, first)
    results.publish_outcome(office.client, outcome(f"{foreign}-1"))
    turn(office, first, 1)
    assert num_rejected(office.client) == (1, 0)
    first.close()
    office.database = other
    turn(office, office.bookkeeper())
    assert get_batch(other, foreign).status is BatchStatus.COMPLETED
    assert num_rejected(office.client) == (0, 0)


def test_all_of_many_unknown_outcomes_are_kept(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    pipeline = office.client.pipeline(transaction=False)
    for number in range(1, 1501):
        record = json.dumps(outcome(f"batch_of_nobody-{number}").to_json())
        pipeline.xadd(keys.RESULTS, {"kind": "outcome", "json": record})
    pipeline.execute()
    for _ in range(20):
        turn(office, bookkeeper, 0.1)
    assert num_rejected(office.client) == (1500, 0)


def test_an_outcome_of_a_batch_that_was_deleted_is_not_kept(office: Office) -> None:
    batch = submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    cancel_batch(office.database, batch)
    settle_stops(office.database, pending_stops(office.database))
    delete_batch(office.database, batch)
    results.publish_outcome(office.client, outcome(f"{batch}-1"))
    turn(office, bookkeeper, 1)
    assert num_rejected(office.client) == (0, 0)
    assert office.client.xlen(keys.RESULTS) == 0
