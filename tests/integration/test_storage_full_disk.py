"""A full disk or a locked database is told, and leaves nothing half written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from storage import database as database_module
from storage.batch_records import Counts, NewBatch
from storage.batches import add_jobs, begin_submission, get_batch, publish_batch
from storage.database import Database
from storage.errors import BackupFailed, DatabaseBusy, DiskFull, StorageError
from storage.job_records import ClaimedJob, Fate, NewJob, OutcomeRow
from storage.jobs import claim_waiting, progress
from storage.outcomes import record_outcomes
from storage.retention import backup
from storage.states import JobState
from storage.stops import cancel_batch, pending_stops, settle_stops

REQUEST = '{"prompt":"p","seed":1}'


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with Database.open(f"sqlite:///{tmp_path}/shardq.sqlite3") as database:
        yield database


def limit(db: Database, spare_pages: int) -> None:
    """Let the database grow by no more than this: to SQLite that is a full disk."""
    with db.read() as connection:
        used = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {used + spare_pages}"))


def make_room(db: Database) -> None:
    limit(db, 1_000_000)


def jobs(count: int, size: int = 10) -> list[NewJob]:
    text_of_size = "x" * size
    return [NewJob(n, f"id-{n}", "m", "u", f'{{"prompt":"{text_of_size}"}}') for n in range(1, count + 1)]


def submit(db: Database, count: int) -> str:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, jobs(count))
    return publish_batch(db, submission).id


def claim(db: Database) -> list[ClaimedJob]:
    return claim_waiting(db, "m", max_jobs=10_000, max_bytes=10**9)


def test_a_submission_that_does_not_fit_writes_nothing_of_its_chunk(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash", "n"))
    limit(db, 8)
    with pytest.raises(DiskFull, match=r"shardq\.sqlite3: the disk is full: nothing was written"):
        add_jobs(db, submission, jobs(500, size=2000))

    make_room(db)
    assert get_batch(db, "n").counts == Counts()
    add_jobs(db, submission, jobs(500, size=2000))
    assert publish_batch(db, submission).counts == Counts(waiting=500)


def test_outcomes_that_do_not_fit_are_recorded_later_all_of_them(db: Database) -> None:
    batch_id = submit(db, 100)
    claimed = claim(db)
    outcomes = [OutcomeRow(item.id, 1, "h", JobState.COMPLETED, text="t" * 3000) for item in claimed]
    limit(db, 8)
    for _ in range(3):
        with pytest.raises(DiskFull):
            record_outcomes(db, outcomes)
        assert progress(db, batch_id).counts == Counts(queued=100)

    make_room(db)
    recorded = record_outcomes(db, outcomes)
    assert (recorded.fates, recorded.ended_batches) == ((Fate.APPLIED,) * 100, (batch_id,))


def test_a_cancellation_that_does_not_fit_cancels_nothing(db: Database) -> None:
    batch_id = submit(db, 3000)
    limit(db, 0)
    with pytest.raises(DiskFull):
        cancel_batch(db, batch_id)

    assert (get_batch(db, batch_id).counts, get_batch(db, batch_id).cancelling_at) == (Counts(waiting=3000), None)
    make_room(db)
    assert cancel_batch(db, batch_id).ended == 3000


def test_what_needs_no_space_works_on_a_full_disk(db: Database) -> None:
    batch_id = submit(db, 20)
    claim(db)
    limit(db, 0)
    cancel_batch(db, batch_id)
    assert settle_stops(db, pending_stops(db)) == 20


def test_a_backup_onto_a_full_disk_fails_and_leaves_nothing(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("storage.retention.copy_sqlite", no_room)
    with pytest.raises(BackupFailed, match="database or disk is full"):
        backup(db, tmp_path / "backup")
    assert not [path for path in tmp_path.iterdir() if "backup" in path.name]


@pytest.mark.parametrize(
    "act",
    [
        lambda db: begin_submission(db, NewBatch("hash")),
        lambda db: record_outcomes(db, [OutcomeRow("nothing-1", 1, "h", JobState.COMPLETED)]),
        lambda db: cancel_batch(db, "batch_none"),
    ],
    ids=["begin_submission", "record_outcomes", "cancel_batch"],
)
def test_a_database_that_another_program_keeps_locked_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Database], object]
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 100)
    with (
        Database.open(f"sqlite:///{tmp_path}/x.sqlite3") as db,
        closing(sqlite3.connect(tmp_path / "x.sqlite3", isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseBusy, match=r"x\.sqlite3 is locked by another process"):
            act(db)
        assert issubclass(DatabaseBusy, StorageError)
        other.execute("ROLLBACK")
        assert begin_submission(db, NewBatch("hash")).batch.counts == Counts()
