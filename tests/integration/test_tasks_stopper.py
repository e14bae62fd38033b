"""Cancelled and expired jobs end, wherever they are."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.batches import get_batch
from storage.job_records import RunningJob
from storage.jobs import claim_waiting, iterate_results, mark_running
from storage.states import BatchStatus, JobState
from storage.stops import cancel_batch, cancel_job
from tasks import heads, keys, lease, queues, results, stops
from tasks.feeder import feed_once
from tasks.generation import StopReason
from tasks.stopper import KEEP_FLAG_S, SETTLE_S, Stopper, stop_once
from tests.bookkeeping import MODEL, Office, head_info, open_office, outcome, submit

GO_ON = threading.Event()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path) as opened:
        yield opened


@pytest.fixture
def stopper(office: Office) -> Stopper:
    return Stopper(office.database, office.client, office.clock)


def states(office: Office, batch: str) -> list[JobState]:
    return [job.state for job in iterate_results(office.database, batch)]


def claim(office: Office, number: int = 1) -> list[str]:
    """Jobs whose messages are nowhere: claimed, not published; their task ids."""
    jobs = claim_waiting(office.database, MODEL, max_jobs=number, max_bytes=10**6)
    return [f"{job.id}.{job.attempt}" for job in jobs]


def test_jobs_that_wait_in_the_queue_end_with_the_first_turn(office: Office, stopper: Stopper) -> None:
    batch = submit(office.database, 3, priority=5)
    other = submit(office.database, 2, priority=5)
    feed_once(office.database, office.settings)
    cancel_batch(office.database, batch)
    assert states(office, batch) == [JobState.QUEUED] * 3
    assert stopper.turn() == 3
    assert states(office, batch) == [JobState.CANCELLED] * 3
    assert get_batch(office.database, batch).status is BatchStatus.CANCELLED
    assert states(office, other) == [JobState.QUEUED] * 2
    assert queues.num_waiting(office.client, MODEL) == 2


def test_the_command_line_stops_with_the_same_code(office: Office) -> None:
    batch = submit(office.database, 4)
    feed_once(office.database, office.settings)
    cancel_batch(office.database, batch)
    assert stop_once(office.database, office.settings) == 4
    assert get_batch(office.database, batch).status is BatchStatus.CANCELLED


@pytest.mark.parametrize("place", ["leased", "live", "unacked"])
def test_a_job_that_somebody_holds_is_flagged_and_left_to_them(office: Office, stopper: Stopper, place: str) -> None:
    batch = submit(office.database, 1)
    (task_id,) = claim(office)
    if place == "leased":
        lease.acquire(office.client, task_id, "h1", "h1-1", ttl_ms=100_000)
    if place == "unacked":
        office.client.sadd(keys.HEADS, "h1")
        office.client.hset(keys.unacked("h1"), "tag", json.dumps([{"headers": {"id": task_id}}, "", ""]))
    heads.beat(office.client, head_info(live=(task_id,) if place == "live" else ()))
    cancel_batch(office.database, batch)
    for _ in range(3):
        assert stopper.turn() == 0
        office.clock.now += SETTLE_S
    assert stops.flagged(office.client, [task_id]) == {task_id: StopReason.CANCELLED}
    assert states(office, batch) == [JobState.QUEUED]


def test_a_job_that_nobody_holds_ends_after_a_moment(office: Office, stopper: Stopper) -> None:
    batch = submit(office.database, 1)
    claim(office)
    cancel_batch(office.database, batch)
    assert stopper.turn() == 0
    office.clock.now += SETTLE_S + 0.1
    assert stopper.turn() == 1
    assert states(office, batch) == [JobState.CANCELLED]


def test_the_text_of_a_stopped_job_is_kept_and_a_finished_one_stays_finished(office: Office) -> None:
    batch = submit(office.database, 2)
    bookkeeper = office.bookkeeper()
    first, second = (task_id.rpartition(".")[0] for task_id in claim(office, 2))
    mark_running(office.database, [RunningJob(first, 1, "h1"), RunningJob(second, 1, "h1")])
    for job in (first, second):
        lease.acquire(office.client, f"{job}.1", "h1", "h1-1")
    cancel_batch(office.database, batch)
    bookkeeper.turn(GO_ON, block_ms=0)
    assert get_batch(office.database, batch).status is BatchStatus.CANCELLING
    partial = dataclasses.replace(outcome(first, text="Once upon"), finish_reason=None, stopped=StopReason.CANCELLED)
    results.publish_outcome(office.client, partial)
    results.publish_outcome(office.client, outcome(second, text="The end."))
    office.clock.now += 1
    bookkeeper.turn(GO_ON, block_ms=0)
    rows = list(iterate_results(office.database, batch))
    assert [(row.state, row.text) for row in rows] == [
        (JobState.CANCELLED, "Once upon"),
        (JobState.COMPLETED, "The end."),
    ]
    assert get_batch(office.database, batch).status is BatchStatus.CANCELLED


def test_a_stopped_job_whose_head_died_ends_when_the_head_is_given_up(office: Office) -> None:
    batch = submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    bookkeeper.turn(GO_ON, block_ms=0)
    raw = office.client.rpop(keys.queue(MODEL))
    (task_id,) = (f"{job.id}.1" for job in iterate_results(office.database, batch))
    office.client.hset(keys.unacked("h1"), "tag", b"[" + raw + b', "", "shardq.tiny"]')  # type: ignore[operator]
    office.client.zadd(keys.unacked_index("h1"), {"tag": 1.0})
    office.client.sadd(keys.HEADS, "h1")
    lease.acquire(office.client, task_id, "h1", "h1-1", ttl_ms=100_000)
    cancel_batch(office.database, batch)
    for _ in range(8):
        office.clock.now += 1
        bookkeeper.turn(GO_ON, block_ms=0)
    assert states(office, batch) == [JobState.CANCELLED]
    assert queues.num_waiting(office.client, MODEL) == 0
    assert heads.known_heads(office.client) == set()


def test_one_job_can_be_stopped_alone(office: Office, stopper: Stopper) -> None:
    batch = submit(office.database, 3)
    feed_once(office.database, office.settings)
    cancel_job(office.database, f"{batch}-2")
    stopper.turn()
    assert states(office, batch) == [JobState.QUEUED, JobState.CANCELLED, JobState.QUEUED]


def test_flags_of_ended_jobs_are_dropped_after_a_while(office: Office, stopper: Stopper) -> None:
    batch = submit(office.database, 1)
    feed_once(office.database, office.settings)
    cancel_batch(office.database, batch)
    stopper.turn()
    office.clock.now += KEEP_FLAG_S / 2
    stopper.turn()
    assert office.client.hlen(keys.STOPS) == 1
    office.clock.now += KEEP_FLAG_S
    stopper.turn()
    assert office.client.hlen(keys.STOPS) == 0
