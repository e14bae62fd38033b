"""Tasks that heads of an earlier version cannot read wait for one that can, and hold up nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from storage.states import JobState
from storage.tables import job
from tasks import generation, heads, keys, queues
from tasks.generation import GenerationRequest
from tasks.reconciler import CONFIRM_S, Reconciler
from tests.bookkeeping import MODEL, Office, at_work, head_info, open_office, submit
from tests.integration.test_fronts import wait_until
from tests.integration.test_fronts_recovery import ended, full_head, rows

#: a job with this parameter is of version 2 in these tests
LATER = {"min_tokens": 1}


@pytest.fixture(autouse=True)
def second_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that knows of a second version of the tasks; fronts are told which they take."""
    monkeypatch.setitem(generation.SINCE, "min_tokens", 2)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path, window_min_jobs=10) as opened:
        yield opened


def waiting(office: Office, *versions: int) -> int:
    return queues.num_waiting(office.client, MODEL, versions=versions)


def in_database(office: Office, batch: str) -> Counter[JobState]:
    return Counter(row.state for row in rows(office, batch))


def test_a_head_never_takes_what_it_cannot_read_and_one_that_can_does_it(office: Office) -> None:
    with at_work(office):
        later, usual = submit(office.database, 2, **LATER), submit(office.database, 2)
        with full_head(office, "h1", reads=1):
            wait_until(lambda: ended(office, usual) == {JobState.COMPLETED: 2})
            assert in_database(office, later) == {JobState.QUEUED: 2}
            with full_head(office, "h2", reads=2) as other:
                wait_until(lambda: ended(office, later) == {JobState.COMPLETED: 2})
                assert len(other.engine.delivered) == 2
    assert {row.deliveries for row in rows(office, later)} == {1}


def test_a_higher_priority_comes_first_whatever_the_version(office: Office) -> None:
    names = keys.ready(MODEL)
    assert names[:3] == ["shardq.tiny:v2", "shardq.tiny", "shardq.tiny:v2:1"]
    assert [keys.queue_of(name) for name in names] == ["shardq.tiny"] * 20


def test_what_a_dead_head_had_taken_goes_back_to_its_own_version(office: Office) -> None:
    with at_work(office):
        batch = submit(office.database, 1, priority=3, **LATER)
        with full_head(office, "h1", delay_s=None, reads=2) as it:
            wait_until(lambda: it.live() == 1)
            it.fronts.close()
        wait_until(lambda: office.client.llen("shardq.tiny:v2:3") == 1)
        assert waiting(office, 1) == 0
        with full_head(office, "h2", reads=2):
            wait_until(lambda: ended(office, batch) == {JobState.COMPLETED: 1})


def test_jobs_that_no_living_head_can_read_take_no_place_from_others(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    heads.beat(office.client, head_info(slots=1))
    later, usual = submit(office.database, 100, **LATER), submit(office.database, 100)
    for _ in range(3):
        bookkeeper._feeder.turn()
    assert (waiting(office, 1), waiting(office, 2)) == (10, 10)
    assert in_database(office, later) == {JobState.QUEUED: 10, JobState.WAITING: 90}
    assert in_database(office, usual) == {JobState.QUEUED: 10, JobState.WAITING: 90}
    claimed = {row.id: row.deliveries for row in rows(office, later)}
    bookkeeper._feeder.turn()
    assert claimed == {row.id: row.deliveries for row in rows(office, later)}


def test_they_are_fed_in_turn_as_soon_as_a_head_lives_that_reads_them(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    heads.beat(office.client, head_info(slots=1))
    later = submit(office.database, 30, **LATER)
    bookkeeper._feeder.turn()
    heads.say_host(office.client)
    heads.beat(office.client, replace(head_info("h2", slots=9), reads=2))
    bookkeeper._feeder.turn()
    assert in_database(office, later) == {JobState.QUEUED: 30}


def test_a_batch_held_back_for_another_head_is_fed_again_once_the_queue_has_room(office: Office) -> None:
    feeder = office.bookkeeper()._feeder
    heads.beat(office.client, head_info(slots=1))
    batch = submit(office.database, 30, **LATER)
    feeder.turn()
    queues.remove(office.client, MODEL, set(queues.waiting_ids(office.client, MODEL)))
    feeder.turn()
    assert waiting(office, 2) == 10
    assert in_database(office, batch) == {JobState.QUEUED: 20, JobState.WAITING: 10}


def test_without_a_head_all_versions_share_one_window(office: Office) -> None:
    submit(office.database, 30, **LATER)
    submit(office.database, 30)
    office.bookkeeper()._feeder.turn()
    assert (waiting(office, 1), waiting(office, 2)) == (5, 5)


def test_a_cancelled_job_is_taken_out_of_the_queue_of_its_version(office: Office) -> None:
    batch = submit(office.database, 1, **LATER)
    office.bookkeeper()._feeder.turn()
    (row,) = rows(office, batch)
    task_id = f"{row.id}.{row.attempt}"
    assert list(queues.waiting_ids(office.client, MODEL)) == [task_id]
    assert queues.remove(office.client, MODEL, {task_id}) == {task_id}


def written_by_a_later_version(office: Office, batch: str) -> None:
    """All jobs of a batch ask for something that this version does not know."""
    request = json.dumps({**GenerationRequest("Hi", None, 7).to_json(), "later": 1})
    with office.database.write() as connection:
        connection.execute(job.update().where(job.c.batch_id == batch).values(request=request))


def test_jobs_that_a_later_host_wrote_wait_in_the_database_of_an_earlier_one_and_hold_up_nothing(
    office: Office,
) -> None:
    bookkeeper = office.bookkeeper()
    later, usual = submit(office.database, 20), submit(office.database, 20)
    written_by_a_later_version(office, later)
    for _ in range(3):
        bookkeeper._feeder.turn()
    assert in_database(office, later) == {JobState.WAITING: 20}
    assert in_database(office, usual) == {JobState.QUEUED: 10, JobState.WAITING: 10}


def test_what_a_later_host_had_queued_waits_again_in_the_database_of_an_earlier_one(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    batch = submit(office.database, 3)
    bookkeeper._feeder.turn()
    written_by_a_later_version(office, batch)
    office.client.delete(*keys.ready(MODEL))  # they stand in lists that this version does not know of
    reconciler = Reconciler(office.database, office.client, office.publisher, 1.0)
    assert [reconciler.scan(now) for now in (0.0, CONFIRM_S + 1)] == [0, 0]
    assert in_database(office, batch) == {JobState.WAITING: 3}
