"""Messages that are damaged, through real fronts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.states import JobState
from tasks import keys, results, stops
from tasks.generation import FailureType, Outcome, StopReason
from tasks.lease import LeaseState, acquire
from tests.bookkeeping import MODEL as MODEL_OF_OFFICE
from tests.bookkeeping import at_work, open_office, submit
from tests.integration.fake_engine import MODEL
from tests.integration.test_fronts import Queue, head, make_task, wait_until
from tests.integration.test_fronts_recovery import ended, full_head

Message = dict[str, Any]


@pytest.fixture
def server(redis_url: str) -> Queue:
    return Queue(redis_url)


def publish_damaged(server: Queue, number: int, damage: Callable[[Message], Message]) -> None:
    """Queue a message after something was done to it."""
    server.publish(number)
    message = json.loads(server.client.lpop(keys.queue(MODEL)))  # type: ignore[arg-type]
    server.client.lpush(keys.queue(MODEL), json.dumps(damage(message)))


def from_a_newer_host(message: Message) -> Message:
    (values,), by_name, embedded = json.loads(base64.b64decode(message["body"]))
    values["request"]["newer"] = 1
    return with_body(json.dumps([[values], by_name, embedded]).encode())(message)


def with_body(body: bytes) -> Callable[[Message], Message]:
    return lambda message: {**message, "body": base64.b64encode(body).decode()}


def without_id(message: Message) -> Message:
    return {**message, "headers": {"task": message["headers"]["task"]}}


def outcomes(server: Queue) -> dict[str, Outcome]:
    return {record.job: record for record in server.records() if isinstance(record, Outcome)}


def test_no_damaged_message_stops_the_front_or_those_behind_it(server: Queue) -> None:
    bodies = [b"{", b"null", b"[[]]", b"[[], {}, {}]", b"[" * 100_000]
    for number, body in enumerate(bodies):
        publish_damaged(server, number, with_body(body))
    publish_damaged(server, 5, lambda message: {**message, "body": "?"})
    publish_damaged(server, 6, from_a_newer_host)
    publish_damaged(server, 7, without_id)
    server.publish(8)
    with head(server, count=1) as it:
        fronts = it.fronts.pids()
        it.consume()
        wait_until(server.settled)
        assert it.fronts.pids() == fronts
    assert it.engine.delivered == ["job-8.0"]
    assert set(server.outcomes().values()) == {1}
    failures = {job: outcome.failure for job, outcome in outcomes(server).items()}
    assert failures == {**{f"job-{number}": FailureType.INTERNAL for number in range(7)}, "job-8": None}
    rejected: Any = server.client.xrange(keys.REJECTED)
    ((_, fields),) = rejected
    assert "headers" in json.loads(fields[b"json"])


def test_what_cannot_be_read_is_ended_by_its_holder_only(server: Queue) -> None:
    task = make_task(1)
    assert acquire(server.client, task.task_id, "newer-head", "i").state is LeaseState.HELD
    publish_damaged(server, 1, from_a_newer_host)
    with head(server, count=1) as it:
        it.consume()
        wait_until(lambda: server.unacked() == 1)
        assert not server.outcomes()
        results.publish_outcome(server.client, Outcome.unbegun(task, "newer-head", stopped=StopReason.EXPIRED))
        wait_until(server.settled)
    assert outcomes(server)["job-1"].head == "newer-head"
    assert server.outcomes() == {"job-1": 1}


def test_what_cannot_be_read_and_is_to_stop_is_stopped(server: Queue) -> None:
    stops.flag(server.client, {"job-1.0": StopReason.CANCELLED})
    publish_damaged(server, 1, from_a_newer_host)
    with head(server, count=1) as it:
        it.consume()
        wait_until(server.settled)
    assert (outcomes(server)["job-1"].stopped, outcomes(server)["job-1"].failure) == (StopReason.CANCELLED, None)


def test_a_message_that_only_the_server_can_read_is_put_aside_and_its_job_runs(tmp_path: Path) -> None:
    with open_office(tmp_path) as office, at_work(office):
        batch = submit(office.database, 2)
        wait_until(lambda: office.client.llen(keys.queue(MODEL_OF_OFFICE)) == 2)
        raw: Any = office.client.rpop(keys.queue(MODEL_OF_OFFICE))
        office.client.rpush(keys.queue(MODEL_OF_OFFICE), raw.replace(b'"lang": "py"', b'"lang": "\xff"'))
        with full_head(office, "h1"):
            wait_until(lambda: ended(office, batch) == {JobState.COMPLETED: 2}, 60)
            wait_until(lambda: office.client.xlen(keys.REJECTED) == 1)
