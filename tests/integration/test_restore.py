"""A backup in the place of the database: what becomes of jobs and results, and what is refused."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cli.errors import ExitCode
from storage.addresses import sqlite_url
from storage.batches import get_batch, list_batches
from storage.database import Database
from storage.errors import RestoreFailed, SchemaTooNew
from storage.identity import read_identity
from storage.jobs import get_job, iterate_results
from storage.restoring import restore
from storage.retention import backup
from storage.states import BatchStatus, JobState
from tasks import keys, queues, results
from tasks.bookkeeper import Bookkeeper
from tasks.lease import acquire
from tasks.rejected import rejected
from tests.bookkeeping import MODEL, Office, open_office, outcome, submit
from tests.cli_runner import Shardq, error_of

GO_ON = threading.Event()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path, scan_interval_s=5) as opened:
        yield opened


def turn(office: Office, bookkeeper: Bookkeeper, seconds: float = 0.0) -> None:
    office.clock.now += seconds
    bookkeeper.turn(GO_ON, block_ms=0)


def take(office: Office, *jobs: str) -> None:
    """Heads take these jobs' messages, and admit them."""
    queues.remove(office.client, MODEL, [f"{job}.1" for job in jobs])
    for job in jobs:
        acquire(office.client, f"{job}.1", "h1", "h1-1")


def finish(office: Office, job: str) -> None:
    results.publish_outcome(office.client, outcome(job))


def test_jobs_in_flight_at_the_backup_end_and_no_later_result_is_lost(office: Office) -> None:
    batch = submit(office.database, 4)
    before, after, running, waiting = (f"{batch}-{line}" for line in range(1, 5))
    first = office.bookkeeper()
    turn(office, first)
    take(office, before, after, running)
    finish(office, before)
    turn(office, first, 1)
    backup(office.database, office.directory / "backup.sqlite3")
    own = read_identity(office.database)

    # what happens until the host dies is lost with it
    finish(office, after)
    later = submit(office.database, 1)
    turn(office, first, 1)
    take(office, f"{later}-1")
    assert get_job(office.database, after).state is JobState.COMPLETED
    first.close()
    office.database.close()

    kept = restore(office.directory / "backup.sqlite3", office.directory / "jobs.sqlite3")

    with Database.open(office.database_url) as restored:
        assert read_identity(restored).id == own.id
        assert [get_job(restored, job).state for job in (before, after)] == [JobState.COMPLETED, JobState.QUEUED]
        office.database = restored
        second = office.bookkeeper()
        finish(office, running)
        finish(office, f"{later}-1")
        for _ in range(3):
            turn(office, second, 6)
        # the result that only the lost database had is generated again, the others came or wait as before
        assert set(queues.waiting_ids(office.client, MODEL)) == {f"{after}.1", f"{waiting}.1"}
        assert get_job(restored, running).state is JobState.COMPLETED
        finish(office, after)
        finish(office, waiting)
        turn(office, second, 1)
        assert get_batch(restored, batch).status is BatchStatus.COMPLETED
        assert {job.text for job in iterate_results(restored, batch)} == {"there"}
        # what came for a job that the backup does not have is kept, and the lost state still has that job
        assert [item.outcome and item.outcome.job for item in rejected(office.client)] == [f"{later}-1"]
    assert kept is not None
    with Database.open(sqlite_url(kept)) as lost:
        assert {row.id for row in list_batches(lost)} == {batch, later}


@pytest.fixture
def run(tmp_path: Path, redis_url: str) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


def backed_up(run: Shardq, tmp_path: Path) -> tuple[Path, str]:
    """A backup with one batch, and its id."""
    with run.database() as database:
        batch = submit(database, 2)
    path = tmp_path / "backup.sqlite3"
    assert run("backup", str(path)).exit_code == ExitCode.OK
    return path, batch


def ids(run: Shardq) -> list[str]:
    return [row["id"] for row in json.loads(run("list", "--json").stdout)]


def test_the_command_puts_the_backup_in_place_and_keeps_what_was_there(run: Shardq, tmp_path: Path) -> None:
    path, batch = backed_up(run, tmp_path)
    content = path.read_bytes()
    with run.database() as database:
        later = submit(database, 1)
    result = run("restore", str(path), "--json")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert ids(run) == [batch]
    assert path.read_bytes() == content
    kept = Path(json.loads(result.stdout)["kept"])
    assert kept.stat().st_mode & 0o077 == 0
    with Database.open(sqlite_url(kept)) as there:
        assert {row.id for row in list_batches(there)} == {batch, later}
    assert {name for name in (item.name for item in run.data_dir.iterdir()) if name.startswith(".")} == set()


def test_a_backup_can_be_restored_where_nothing_is_or_what_is_there_is_damaged(run: Shardq, tmp_path: Path) -> None:
    path, batch = backed_up(run, tmp_path)
    database = run.data_dir / "shardq.sqlite3"
    database.write_bytes(b"not a database any more" * 1000)
    assert "what was there is in " in run("restore", str(path)).stderr
    assert ids(run) == [batch]
    (kept,) = run.data_dir.glob("*.bak")
    assert kept.read_bytes().startswith(b"not a database")

    elsewhere = Shardq(tmp_path / "new", {})
    assert elsewhere("restore", str(path), SHARDQ_BROKER_URL="redis://127.0.0.1:1/0").exit_code == ExitCode.OK
    assert ids(elsewhere) == [batch]


def test_a_backup_from_before_an_upgrade_is_upgraded_on_the_way(tmp_path: Path) -> None:
    old, target = tmp_path / "old.sqlite3", tmp_path / "jobs.sqlite3"
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.executescript(Path(__file__).with_name("storage_version_1.sql").read_text())
        connection.execute("INSERT INTO schema_version VALUES (1)")
    assert restore(old, target) is None
    with Database.open(sqlite_url(target)) as database:
        assert read_identity(database).mark is None


@pytest.mark.parametrize("kind", ["text", "foreign", "newer", "itself"])
def test_what_is_no_backup_changes_nothing(run: Shardq, tmp_path: Path, kind: str) -> None:
    _, batch = backed_up(run, tmp_path)
    database = run.data_dir / "shardq.sqlite3"
    path = tmp_path / "wrong.sqlite3" if kind != "itself" else database
    if kind == "text":
        path.write_text("prompts\n" * 1000)
    elif kind != "itself":
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"CREATE TABLE {'schema_version' if kind == 'newer' else 'x'} (version INTEGER)")
            if kind == "newer":
                connection.execute("INSERT INTO schema_version VALUES (999)")
    with pytest.raises(SchemaTooNew if kind == "newer" else RestoreFailed):
        restore(path, database)
    assert error_of(run("restore", str(path)))
    assert ids(run) == [batch]
    assert list(run.data_dir.glob("*.bak")) == []


def test_nothing_is_restored_while_a_bookkeeper_is_at_work(run: Shardq, tmp_path: Path, office: Office) -> None:
    path, batch = backed_up(run, tmp_path)
    office.client.set(keys.BOOKKEEPER, "at work")
    with run.database() as database:
        later = submit(database, 1)
    assert "stop it first" in error_of(run("restore", str(path), SHARDQ_BROKER_URL=office.server.url))
    assert set(ids(run)) == {batch, later}


def test_postgresql_has_its_own_tools(run: Shardq, tmp_path: Path) -> None:
    path, _ = backed_up(run, tmp_path)
    result = run("restore", str(path), SHARDQ_DATABASE_URL="postgresql://db.example.org/jobs")
    assert "its own tools" in error_of(result)
