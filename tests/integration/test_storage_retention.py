"""Deleting batches and backing up a database."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage.batch_records import NewBatch, Submission
from storage.batches import add_jobs, begin_submission, get_batch, list_batches, publish_batch
from storage.database import Database
from storage.errors import BackupFailed, BatchNotFound, BatchOpen, SubmissionSuperseded
from storage.job_records import Fate, NewJob, OutcomeRow
from storage.jobs import claim_waiting, iterate_results
from storage.outcomes import record_outcomes, unknown_records
from storage.retention import backup, delete_batch, prune
from storage.states import JobState
from storage.stops import cancel_batch
from tests.integration.storage_databases import Clock

pytest_plugins = ["tests.integration.storage_databases"]

REQUEST = '{"prompt":"p","seed":1}'
DAY = 86_400.0


def write(db: Database, count: int) -> Submission:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, [NewJob(n, f"id-{n}", "m", "u", REQUEST) for n in range(1, count + 1)])
    return submission


def submit(db: Database, count: int) -> str:
    return publish_batch(db, write(db, count)).id


def test_an_ended_batch_is_deleted_with_its_jobs(db: Database) -> None:
    kept, deleted = submit(db, 2), submit(db, 3)
    cancel_batch(db, deleted)

    assert delete_batch(db, deleted) == 3

    assert [batch.id for batch in list_batches(db)] == [kept]
    assert list(iterate_results(db, deleted)) == []
    assert len(list(iterate_results(db, kept))) == 2
    with pytest.raises(BatchNotFound):
        delete_batch(db, deleted)


def test_an_open_batch_cannot_be_deleted(db: Database) -> None:
    batch_id = submit(db, 2)
    with pytest.raises(BatchOpen, match="it is in_progress"):
        delete_batch(db, batch_id)
    claim_waiting(db, "m", max_jobs=1, max_bytes=10**6)
    cancel_batch(db, batch_id)
    with pytest.raises(BatchOpen, match="it is cancelling"):
        delete_batch(db, batch_id)
    assert get_batch(db, batch_id).counts.total == 2


def test_an_interrupted_submission_can_be_deleted_and_no_longer_writes(db: Database) -> None:
    submission = write(db, 2)
    assert delete_batch(db, submission.batch.id) == 2
    with pytest.raises(SubmissionSuperseded):
        publish_batch(db, submission)


def test_a_record_of_a_deleted_job_is_counted_and_does_no_harm(db: Database) -> None:
    batch_id = submit(db, 1)
    cancel_batch(db, batch_id)
    delete_batch(db, batch_id)

    recorded = record_outcomes(db, [OutcomeRow(f"{batch_id}-1", 1, "h", JobState.COMPLETED, "late")])
    assert (recorded.fates, unknown_records(db)) == ((Fate.DELETED,), 1)


def test_only_batches_that_ended_long_enough_ago_are_pruned(db: Database, clock: Clock) -> None:
    ids = {}
    for name in ("oldest", "old", "open", "recent"):
        ids[name] = submit(db, 1)
    validating = write(db, 1).batch.id
    cancel_batch(db, ids["oldest"])
    clock.now += 1
    (job,) = [item for item in claim_waiting(db, "m", max_jobs=9, max_bytes=10**6) if item.batch_id == ids["old"]]
    record_outcomes(db, [OutcomeRow(job.id, 1, "h", JobState.COMPLETED, "x")])
    clock.now += DAY
    for item in (ids["recent"],):
        record_outcomes(db, [OutcomeRow(f"{item}-1", 1, "h", JobState.FAILED)])
    clock.now += 30 * DAY - 0.5

    assert prune(db, 30 * DAY) == [ids["oldest"], ids["old"]]
    assert {batch.id for batch in list_batches(db)} == {ids["open"], ids["recent"], validating}
    clock.now += 1
    assert prune(db, 30 * DAY) == [ids["recent"]]
    assert prune(db, 0) == []


@pytest.fixture
def file_db(tmp_path: Path) -> Iterator[Database]:
    with Database.open(f"sqlite:///{tmp_path}/shardq.sqlite3") as database:
        yield database


def test_a_backup_is_a_whole_database_that_only_its_owner_may_read(file_db: Database, tmp_path: Path) -> None:
    batch_id = submit(file_db, 3)
    target = tmp_path / "backup.sqlite3"

    backup(file_db, target)

    assert target.stat().st_mode & 0o077 == 0
    assert {path.name for path in tmp_path.iterdir() if "backup" in path.name} == {"backup.sqlite3"}
    with Database.open(f"sqlite:///{target}") as copy:
        assert get_batch(copy, batch_id) == get_batch(file_db, batch_id)


def test_a_backup_of_a_database_in_use_is_the_state_of_one_moment(file_db: Database, tmp_path: Path) -> None:
    submit(file_db, 2000)
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1
            submit(file_db, 2)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(5):
            backup(file_db, tmp_path / f"{number}.copy")
    finally:
        done.set()
        worker.join()

    for number in range(5):
        with closing(sqlite3.connect(tmp_path / f"{number}.copy")) as copy:
            assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            ((batches, jobs),) = copy.execute(
                "SELECT (SELECT count(*) FROM batch WHERE status = 'in_progress'), "
                "(SELECT count(*) FROM job JOIN batch ON batch.id = batch_id WHERE status = 'in_progress')"
            )
            assert jobs == 2000 + 2 * (batches - 1)


def test_a_backup_overwrites_nothing(file_db: Database, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    with pytest.raises(BackupFailed, match="precious exists"):
        backup(file_db, target)
    assert target.read_text() == "precious"


def test_a_backup_that_cannot_be_written_leaves_nothing(file_db: Database, tmp_path: Path) -> None:
    with pytest.raises(BackupFailed, match=r"no backup was written to .*nowhere/b"):
        backup(file_db, tmp_path / "nowhere" / "b")
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"shardq.sqlite3"}


def test_postgresql_is_backed_up_by_its_own_tools(db: Database, tmp_path: Path) -> None:
    if db.sqlite_file is not None:
        pytest.skip("SQLite is backed up here")
    with pytest.raises(BackupFailed, match="pg_dump"):
        backup(db, tmp_path / "b")


def left_of(text: str, directory: Path) -> dict[str, int]:
    """How often a text stands in the files of a directory."""
    found = {path.name: path.read_bytes().count(text.encode()) for path in directory.iterdir()}
    return {name: number for name, number in found.items() if number}


@pytest.mark.parametrize("size", [10, 3000, 60_000])
def test_prompts_and_answers_of_a_deleted_batch_stand_in_no_file(file_db: Database, tmp_path: Path, size: int) -> None:
    kept = submit(file_db, 3)
    submission = begin_submission(file_db, NewBatch("hash"))
    request = f'{{"prompt":"{"forget me " * (size // 10)}"}}'
    add_jobs(file_db, submission, [NewJob(n, f"id-{n}", "m2", "u", request) for n in range(1, 31)])
    batch_id = publish_batch(file_db, submission).id
    for job in claim_waiting(file_db, "m2", max_jobs=99, max_bytes=10**9):
        answer = "forget me " * (size // 5)
        record_outcomes(file_db, [OutcomeRow(job.id, 1, "h", JobState.COMPLETED, answer, error_message="forget me")])
    assert left_of("forget me", tmp_path)

    delete_batch(file_db, batch_id)
    assert file_db.empty_log()

    assert left_of("forget me", tmp_path) == {}
    assert len(list(iterate_results(file_db, kept))) == 3


def test_where_there_is_no_room_to_overwrite_deleting_works_and_the_next_one_overwrites_again(
    file_db: Database,
) -> None:
    first, second = submit(file_db, 1), submit(file_db, 1)
    for batch_id in (first, second):
        cancel_batch(file_db, batch_id)
    assert delete_batch(file_db, first, overwrite=False) == 1
    with file_db.read() as connection:
        assert connection.exec_driver_sql("PRAGMA secure_delete").scalar_one() == 1
    assert delete_batch(file_db, second) == 1


def test_a_log_that_somebody_reads_is_not_emptied_until_he_has_done(tmp_path: Path) -> None:
    with Database.open(f"sqlite:///{tmp_path}/shardq.sqlite3", busy_timeout_ms=50) as db:
        batch_id = submit(db, 3)
        with db.read() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM job").scalar_one()
            cancel_batch(db, batch_id)
            delete_batch(db, batch_id)
            assert not db.empty_log()
        assert db.empty_log()
        assert (tmp_path / "shardq.sqlite3-wal").stat().st_size == 0


def test_a_file_shrinks_to_what_it_holds(file_db: Database, tmp_path: Path) -> None:
    kept, deleted = submit(file_db, 5), submit(file_db, 5000)
    cancel_batch(file_db, deleted)
    delete_batch(file_db, deleted)
    assert file_db.empty_log()
    before = (tmp_path / "shardq.sqlite3").stat().st_size
    file_db.shrink()
    assert file_db.empty_log()
    assert (tmp_path / "shardq.sqlite3").stat().st_size < before / 4
    assert len(list(iterate_results(file_db, kept))) == 5
    assert submit(file_db, 2)
