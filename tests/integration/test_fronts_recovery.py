"""Real fronts, fake engines, a real bookkeeper: what is stopped, lost or delivered too often."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage.batches import get_batch
from storage.job_records import JobRow
from storage.jobs import iterate_results
from storage.retries import RetryChoice, retry_batch
from storage.states import BatchStatus, JobState
from storage.stops import cancel_batch
from tasks import keys, stops
from tasks.generation import LONG_CHARACTERS, FailureType, StopReason
from tasks.heads import PRESENCE_MS
from tasks.publish import Publication, Publisher
from tests.bookkeeping import PROFILE, Office, at_work, open_office, outcome, submit
from tests.integration.fake_engine import AUTHKEY, HEAD, MODEL, FakeEngine
from tests.integration.test_fronts import ROOT, Head, Queue, events_of, head, make_task, wait_until
from workers.head.channel import private_address
from workers.head.fronts import Fronts
from workers.head.presence import Identity, Load, Presence
from workers.settings import HeadSettings

#: seconds after the end of a fault within which every job must be under way again
RECOVERY_S = 15.0


@pytest.fixture
def server(redis_url: str) -> Queue:
    return Queue(redis_url)


def try_elsewhere(server: Queue, task_id: str, number: int) -> None:
    """So many other engines were given the task and died."""
    server.client.sadd(keys.tries(task_id), *(f"dead-{n}" for n in range(number)))


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path) as opened, at_work(opened):
        yield opened


@contextmanager
def full_head(
    office: Office, name: str, *, delay_s: float | None = 0.05, count: int = 1, reads: int = 1
) -> Iterator[Head]:
    """Engine, fronts and presence of a head that takes up to four jobs."""
    with ExitStack() as stack:
        engine = FakeEngine(stack.enter_context(private_address()), delay_s=delay_s)
        stack.callback(engine.close)
        settings = HeadSettings(model="/models/any", broker_url=office.server.url, head_id=name)
        presence = Presence(office.client, Identity(name, "tiny", PROFILE, reads=reads), lambda: None)
        presence.working(4, lambda: Load(engine.server.live(), True, 0, 0.0))
        stack.callback(presence.close)
        numbers: dict[str, Any] = {"count": count, "concurrency_total": 4, "grace_s": 0.5, "reads": reads}
        fronts = Fronts(settings, engine.address, AUTHKEY, model="tiny", **numbers)
        stack.callback(fronts.close)
        engine.server.set_consuming(True)
        yield Head(engine, fronts)


def rows(office: Office, batch: str) -> list[JobRow]:
    return list(iterate_results(office.database, batch))


def ended(office: Office, batch: str) -> Counter[JobState]:
    states = Counter(row.state for row in rows(office, batch))
    return Counter(
        {state: number for state, number in states.items() if state not in (JobState.QUEUED, JobState.RUNNING)}
    )


def test_a_stopped_job_costs_no_engine_and_is_shown_as_revoked(server: Queue) -> None:
    stops.flag(server.client, {"job-0.0": StopReason.CANCELLED, "job-1.0": StopReason.EXPIRED})
    with events_of(server) as events, head(server, count=1, total=2) as it:
        server.publish(0, 1, 2)
        it.consume()
        server.wait_for_outcomes(3)
        wait_until(server.settled)
        wait_until(lambda: len([event for event in events if event["type"] == "task-revoked"]) == 2)
    assert it.engine.delivered == ["job-2.0"]
    reasons = {record.job: record.stopped for record in server.records() if not hasattr(record, "at")}
    assert reasons == {"job-0": StopReason.CANCELLED, "job-1": StopReason.EXPIRED, "job-2": None}
    revoked = {event["uuid"]: event["expired"] for event in events if event["type"] == "task-revoked"}
    assert revoked == {"job-0.0": False, "job-1.0": True}


def test_a_job_that_lost_engines_is_a_suspect_and_after_too_many_it_is_not_tried_again(server: Queue) -> None:
    for number, lost in enumerate((1, 2, 4, 5, 9)):
        try_elsewhere(server, f"job-{number}.0", lost)
    with head(server, count=1) as it:
        server.publish(*range(5))
        it.consume()
        server.wait_for_outcomes(5)
        wait_until(server.settled)
    assert sorted(it.engine.delivered) == ["job-0.0", "job-1.0", "job-2.0"]
    assert it.engine.suspects == {"job-1.0", "job-2.0"}
    failures = {record.job: record.failure for record in server.records() if not hasattr(record, "at")}
    assert [failures[f"job-{number}"] for number in range(5)] == [None, None, None, *[FailureType.TOO_MANY_TRIES] * 2]
    assert not server.client.keys("shardq:tries:*")


def test_what_is_handed_back_in_good_order_was_no_try(server: Queue) -> None:
    server.publish(*range(4))
    with head(server, delay_s=None, count=1, total=4, grace_s=0.2) as it:
        it.consume()
        wait_until(lambda: it.live() == 4)
        assert [server.client.scard(keys.tries(f"job-{number}.0")) for number in range(4)] == [1] * 4
        it.engine.server.hand_back("job-0.0")
        it.consume(False)
        wait_until(lambda: server.ready() == 1)
        it.fronts.close()
        assert server.ready() == 4
    assert not server.client.keys("shardq:tries:*")


def test_a_killed_engine_counts_as_a_try_of_the_jobs_in_its_slots(server: Queue) -> None:
    server.publish(*range(8))
    command = [sys.executable, "-m", "tests.integration.fake_engine", server.url, "-1", "3"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: server.unacked() == 8)
        wait_until(lambda: len(server.records()) == 3)
        process.kill()
        process.wait()
        wait_until(lambda: server.ready() == 8 and server.unacked() == 0, 10)
    finally:
        process.kill()
        process.wait()
    assert len(server.client.keys("shardq:tries:*")) == 3


def test_a_killed_engine_counts_as_a_try_of_a_long_prompt_that_it_may_have_been_reading(server: Queue) -> None:
    server.publish(0)
    command = [sys.executable, "-m", "tests.integration.fake_engine", server.url, "-1", "1"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: len(server.records()) == 1)
        long = dataclasses.replace(
            make_task(1), request=dataclasses.replace(make_task(1).request, prompt="x" * LONG_CHARACTERS)
        )
        with Publisher(server.settings) as publisher:
            publisher.publish([Publication(long)])
        wait_until(lambda: server.client.scard(keys.tries(long.task_id)) == 1)
        process.kill()
        process.wait()
        wait_until(lambda: server.ready() == 2 and server.unacked() == 0, 10)
    finally:
        process.kill()
        process.wait()
    assert server.client.scard(keys.tries(long.task_id)) == 1


def test_a_job_delivered_ten_times_costs_one_generation_of_a_surviving_engine(server: Queue) -> None:
    server.publish(*[7] * 4, 8)
    with head(server, delay_s=None, count=2, total=16) as it:
        it.consume()
        wait_until(lambda: server.unacked() == 5)
        for _ in range(2):  # blips: every connection of the fronts breaks, in the middle of everything
            server.client.client_kill_filter(_type="normal", skipme=True)
            time.sleep(1)
        server.publish(*[7] * 4)
        wait_until(lambda: server.unacked() == 9, 60)
        it.engine.release()
        server.wait_for_outcomes(2)
        server.publish(7, 7)
        wait_until(server.settled, 60)
    assert Counter(it.engine.delivered) == {"job-7.0": 1, "job-8.0": 1}
    assert set(server.outcomes()) == {"job-7", "job-8"}


def test_when_its_engine_dies_the_job_costs_one_generation_of_the_next_one(server: Queue) -> None:
    server.publish(*[7] * 5)
    with head(server, delay_s=None) as dying:
        dying.consume()
        wait_until(lambda: server.unacked() == 5)
        dying.engine.server.close()
        wait_until(lambda: server.ready() == 5, 10)
        assert dying.engine.delivered == ["job-7.0"]
    server.publish(*[7] * 5)
    with head(server, delay_s=0.5) as survivor:
        survivor.consume()
        server.wait_for_outcomes(1)
        wait_until(server.settled)
    assert survivor.engine.delivered == ["job-7.0"]
    assert survivor.engine.suspects == set()


def test_a_retried_failure_really_runs_again(office: Office) -> None:
    batch = submit(office.database, 1)
    (task_id,) = (f"{row.id}.1" for row in rows(office, batch))
    office.client.sadd(keys.tries(task_id), *"abcde")
    with full_head(office, "h1") as it:
        wait_until(lambda: ended(office, batch)[JobState.FAILED] == 1)
        assert it.engine.delivered == []
        assert retry_batch(office.database, batch, RetryChoice.of(JobState.FAILED)) == 1
        wait_until(lambda: ended(office, batch)[JobState.COMPLETED] == 1)
        assert it.engine.delivered == [task_id.replace(".1", ".2")]
    (row,) = rows(office, batch)
    assert (row.attempt, row.error_type, row.text) == (2, None, f"text of {row.id}")


def test_a_cancelled_batch_ends_while_fronts_hold_some_of_it(office: Office) -> None:
    batch = submit(office.database, 12)
    with full_head(office, "h1", delay_s=None) as it:
        wait_until(lambda: it.live() == 4)
        cancel_batch(office.database, batch)
        wait_until(lambda: ended(office, batch)[JobState.CANCELLED] == 8)
        live = it.engine.server.live()
        assert stops.flagged(office.client, live) == dict.fromkeys(live, StopReason.CANCELLED)
        stopped = sorted(task_id.removesuffix(".1") for task_id in live[:3])
        for job in stopped:
            partial = dataclasses.replace(outcome(job, text="Once upon"), stopped=StopReason.CANCELLED)
            it.engine.server.finish(partial.task_id, partial)
        wait_until(lambda: ended(office, batch)[JobState.CANCELLED] == 11)
        it.engine.release()  # the last one was quicker than its stop
        wait_until(lambda: ended(office, batch) == {JobState.CANCELLED: 11, JobState.COMPLETED: 1})
    assert sorted(row.id for row in rows(office, batch) if row.text == "Once upon") == stopped
    assert get_batch(office.database, batch).status is BatchStatus.CANCELLED


def test_a_killed_fronts_jobs_are_recorded_in_time_without_a_second_generation(office: Office) -> None:
    batch = submit(office.database, 4)
    with full_head(office, "h1", delay_s=None) as it, full_head(office, "h2", delay_s=None) as other:
        other.engine.server.set_consuming(False)
        wait_until(lambda: it.live() + other.live() == 4)
        killed = time.monotonic()
        for pid in it.fronts.pids():
            os.kill(pid, signal.SIGKILL)
        it.engine.release()
        other.engine.release()
        wait_until(lambda: ended(office, batch)[JobState.COMPLETED] == 4)
        assert time.monotonic() - killed < RECOVERY_S
        assert len(it.engine.delivered) + len(other.engine.delivered) == 4


def test_another_head_does_a_dead_ones_jobs_in_time(office: Office) -> None:
    batch = submit(office.database, 4)
    command = [sys.executable, "-m", "tests.integration.fake_engine", office.server.url, "-1", "4", "tiny"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: office.client.hlen(keys.unacked(HEAD)) == 4)
        office.client.set(keys.head(HEAD), "{}", px=PRESENCE_MS)
        office.client.sadd(keys.HEADS, HEAD)
        fronts = front_pids(process.pid)
        for pid in (process.pid, *fronts):  # a machine without power: nobody hands anything back
            os.kill(pid, signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        with full_head(office, "h2"):
            wait_until(lambda: ended(office, batch)[JobState.COMPLETED] == 4)
        assert time.monotonic() - killed < RECOVERY_S + 5  # the head's own start is in it
    finally:
        process.kill()
        process.wait()
    assert not office.client.keys("shardq:tries:*")


def front_pids(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = (line.split() for line in found.stdout.splitlines())
    return [int(pid) for pid, ppid in pairs if int(ppid) == parent]


def test_a_restarted_queue_server_loses_no_job(tmp_path: Path) -> None:
    with open_office(tmp_path, persistent=True) as office, at_work(office):
        batch = submit(office.database, 40)
        with full_head(office, "h1", delay_s=0.3, count=2) as it:
            wait_until(lambda: ended(office, batch)[JobState.COMPLETED] >= 8)
            port = office.server.port
            office.server.stop()
            time.sleep(2)
            office.server.port = port
            office.server.start()
            began = time.monotonic()
            wait_until(lambda: ended(office, batch)[JobState.COMPLETED] == 40, 60)
            assert time.monotonic() - began < RECOVERY_S + 10  # ten waves of four jobs are in it
            assert not office.client.hlen(keys.unacked("h1"))
            assert len(it.engine.delivered) == 40


def test_a_foreign_message_stops_nobody(server: Queue) -> None:
    server.client.rpush(keys.queue(MODEL), "not json", "{}", '{"properties": 3}')
    server.publish(1)
    with head(server, count=1, total=2) as it:
        it.consume()
        server.wait_for_outcomes(1)
        wait_until(server.settled)
    rejected: Any = server.client.xrange(keys.REJECTED)
    assert [fields[b"json"] for _, fields in rejected] == [b'{"properties": 3}', b"{}", b"not json"]
    assert make_task(1).task_id in it.engine.delivered
