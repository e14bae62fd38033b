"""Front processes between a real queue server and an engine without a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery.exceptions import WorkerShutdown
from celery.worker import state

from benchmarks.link_simulator import LinkShape, LinkSimulator
from tasks import keys, results
from tasks.app import make_app
from tasks.generation import GenerationRequest, GenerationTask, Outcome
from tasks.heads import restore_unacked
from tasks.lease import LeaseState, acquire, release
from tasks.publish import Publication, Publisher
from tasks.results import Started
from tasks.settings import TaskSettings
from tests.integration.fake_engine import AUTHKEY, HEAD, MODEL, FakeEngine
from workers.head import front_settlements
from workers.head.channel import private_address
from workers.head.front_fetch import Taker, connection_class
from workers.head.front_settlements import Settlements
from workers.head.fronts import END_S, Fronts, concurrency, spread
from workers.settings import HeadSettings

ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def make_task(number: int) -> GenerationTask:
    request = GenerationRequest(f"prompt {number}", None, seed=number)
    return GenerationTask(f"job-{number}", 0, "batch", f"id-{number}", MODEL, request)


class Queue:
    """The queue server as a test sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.settings = TaskSettings(broker_url=url)
        self.client = redis.Redis.from_url(url, protocol=2)

    def publish(self, *numbers: int) -> None:
        with Publisher(self.settings) as publisher:
            publisher.publish(Publication(make_task(number)) for number in numbers)

    def ready(self) -> int:
        return sum(self.client.llen(name) for name in keys.ready(MODEL))

    def unacked(self) -> int:
        return self.client.hlen(keys.unacked(HEAD))

    def settled(self) -> bool:
        """Nothing queued, nothing in flight."""
        return not self.ready() and not self.unacked() and not self.client.zcard(keys.unacked_index(HEAD))

    def records(self) -> list[Started | Outcome]:
        entries: Any = self.client.xrange(keys.RESULTS)
        return [results.decode(entry, fields).content for entry, fields in entries]

    def outcomes(self) -> Counter[str]:
        return Counter(record.job for record in self.records() if isinstance(record, Outcome))

    def wait_for_outcomes(self, count: int, timeout_s: float = 30.0) -> None:
        wait_until(lambda: len(self.outcomes()) >= count, timeout_s)


@pytest.fixture
def server(redis_url: str) -> Queue:
    return Queue(redis_url)


class Head:
    """A fake engine and its real fronts."""

    def __init__(self, engine: FakeEngine, fronts: Fronts) -> None:
        self.engine = engine
        self.fronts = fronts

    def consume(self, on: bool = True) -> None:
        self.engine.server.set_consuming(on)

    def live(self) -> int:
        return len(self.engine.server.live())


@contextmanager
def head(
    server: Queue,
    *,
    url: str | None = None,
    delay_s: float | None = 0.05,
    count: int = 2,
    total: int = 8,
    grace_s: float = 0.5,
) -> Iterator[Head]:
    with private_address() as address:
        engine = FakeEngine(address, delay_s=delay_s)
        server.client.set(keys.head(HEAD), "alive")
        settings = HeadSettings(model="/models/any", broker_url=url or server.url, head_id=HEAD)
        fronts = Fronts(
            settings,
            address,
            AUTHKEY,
            model=MODEL,
            count=count,
            concurrency_total=total,
            grace_s=grace_s,
        )
        try:
            wait_until(lambda: engine.server.num_fronts == count)
            yield Head(engine, fronts)
        finally:
            fronts.close()
            engine.close()


def test_every_job_is_recorded_once_and_then_acknowledged(server: Queue) -> None:
    server.publish(*range(40))
    with head(server) as it:
        it.consume()
        server.wait_for_outcomes(40)
        wait_until(server.settled)
        wait_until(lambda: len(server.records()) == 80)
    assert set(server.outcomes().values()) == {1}
    assert len(set(it.engine.delivered)) == len(it.engine.delivered) == 40
    started = [record for record in server.records() if isinstance(record, Started)]
    assert {record.job for record in started} == set(server.outcomes())
    assert all(results.is_done(server.client, make_task(number).task_id) for number in range(40))


def test_a_message_is_acknowledged_only_once_its_outcome_is_in_the_stream(server: Queue) -> None:
    server.publish(*range(8))
    with head(server, delay_s=None) as it:
        server.client.config_set("maxmemory", "1")  # appending is refused; taking and acknowledging are not
        try:
            it.consume()
            wait_until(lambda: it.live() == 8)
            it.engine.release()
            wait_until(lambda: it.live() == 0)
            time.sleep(1)
            assert not server.outcomes()
            assert server.unacked() == 8
        finally:
            server.client.config_set("maxmemory", "0")
        server.wait_for_outcomes(8)
        wait_until(server.settled)
    assert set(server.outcomes().values()) == {1}


def test_a_paused_front_leaves_the_queue_alone(server: Queue) -> None:
    server.publish(*range(20))
    with head(server, delay_s=None) as it:
        time.sleep(2)
        assert server.ready() == 20
        assert server.unacked() == 0
        it.consume()
        wait_until(lambda: it.live() == 8)
        it.consume(False)
        wait_until(lambda: server.unacked() == 8)
        it.engine.release()
        wait_until(lambda: server.unacked() == 0)
        time.sleep(1.5)
        assert server.ready() == 12
        assert len(it.engine.delivered) == 8
        it.consume()
        server.wait_for_outcomes(20)
        wait_until(server.settled)
    assert set(server.outcomes().values()) == {1}


def test_a_message_on_its_way_while_the_front_pauses_is_put_back(server: Queue) -> None:
    with head(server, count=1, total=1, delay_s=0.0) as it:
        number = 0
        for _ in range(20):
            it.consume()
            time.sleep(0.05)
            server.publish(number, number + 1)
            number += 2
            it.consume(False)
        time.sleep(1.5)
        wait_until(lambda: server.unacked() == 0)
        assert len(server.outcomes()) + server.ready() == number
        it.consume()
        server.wait_for_outcomes(number)
        wait_until(server.settled)


def test_a_head_that_looks_dead_gets_nothing(server: Queue) -> None:
    with head(server, count=1) as it:
        server.client.delete(keys.head(HEAD))
        it.consume()
        server.publish(*range(4))
        time.sleep(2.5)
        assert server.ready() == 4
        server.client.set(keys.head(HEAD), "alive")
        server.wait_for_outcomes(4)


def test_only_as_many_messages_are_taken_as_have_a_thread(server: Queue) -> None:
    server.publish(*range(20))
    with head(server, delay_s=None, total=6) as it:
        it.consume()
        wait_until(lambda: it.live() == 6)
        time.sleep(1)
        assert server.unacked() == 6
        assert server.ready() == 14


def test_a_second_message_of_a_live_job_joins_it(server: Queue) -> None:
    server.publish(1, 1, 1)
    with head(server, delay_s=None) as it:
        it.consume()
        wait_until(lambda: server.unacked() == 3)
        it.engine.release()
        wait_until(server.settled)
    assert it.engine.delivered == ["job-1.0"]
    assert set(server.outcomes()) == {"job-1"}


def test_a_message_of_a_finished_job_only_disappears(server: Queue) -> None:
    server.publish(1)
    with head(server) as it:
        it.consume()
        server.wait_for_outcomes(1)
        server.publish(1)
        wait_until(lambda: server.settled())
    assert it.engine.delivered == ["job-1.0"]
    assert server.outcomes() == {"job-1": 1}


def test_a_killed_fronts_jobs_come_again_and_end_once(server: Queue) -> None:
    server.publish(*range(16))
    with head(server, delay_s=None) as it:
        it.consume()
        wait_until(lambda: it.live() == 8)
        victim = it.fronts.pids()[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: it.engine.server.num_fronts == 1)
        it.engine.release()
        # the survivor takes the rest; the victim's are restored by hand instead of after the timeout
        wait_until(lambda: len(server.outcomes()) == 12)
        wait_until(lambda: server.unacked() == 4)
        restore_unacked(server.client, HEAD)
        server.wait_for_outcomes(16)
        wait_until(server.settled)
        wait_until(lambda: it.engine.server.num_fronts == 2)
        assert victim not in it.fronts.pids()
    assert set(server.outcomes().values()) == {1}
    assert len(it.engine.delivered) == 16


def test_a_front_that_is_to_end_does_not_wait_for_a_queue_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connection_class(Taker(redis.Redis(), HEAD, Settlements(redis.Redis(), HEAD, lambda: None)))
    monkeypatch.setattr(state, "should_stop", 0)
    began = time.monotonic()
    with pytest.raises(WorkerShutdown):
        connection("redis://127.0.0.1:1/0")._ensure_connection()
    assert time.monotonic() - began < 5


def test_fronts_end_with_a_killed_engine_and_their_messages_go_back(server: Queue) -> None:
    server.publish(*range(8))
    command = [sys.executable, "-m", "tests.integration.fake_engine", server.url, "-1"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: server.unacked() == 8)
        children = front_pids(process.pid)
        assert len(children) == 2
        killed = time.monotonic()
        process.kill()
        process.wait()
        wait_until(lambda: server.ready() == 8 and server.unacked() == 0, 10)
        wait_until(lambda: not any(alive(pid) for pid in children), 10)
        assert time.monotonic() - killed < 5
    finally:
        process.kill()
        process.wait()
    assert not server.outcomes()


def front_pids(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = (line.split() for line in found.stdout.splitlines())
    return [int(pid) for pid, ppid in pairs if int(ppid) == parent]


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def test_after_the_grace_period_running_jobs_go_back_to_the_queue(server: Queue) -> None:
    server.publish(*range(8))
    with head(server, delay_s=None, grace_s=1.0) as it:
        it.consume()
        wait_until(lambda: it.live() == 8)
        began = time.monotonic()
        it.fronts.close()
        took = time.monotonic() - began
        assert server.ready() == 8
        assert server.unacked() == 0
        assert 1.0 <= took < 1.0 + END_S  # nothing had to be killed
    assert not server.outcomes()
    assert acquire(server.client, "job-0.0", "another head", "another").state is LeaseState.HELD


def test_jobs_that_finish_within_the_grace_period_are_recorded(server: Queue) -> None:
    server.publish(*range(12))
    with head(server, delay_s=1.0, grace_s=10.0) as it:
        it.consume()
        wait_until(lambda: it.live() == 8)
        began = time.monotonic()
        it.fronts.close()
        assert time.monotonic() - began < 4
        assert server.unacked() == 0
    assert len(server.outcomes()) == 8
    assert server.ready() == 4


def test_a_job_another_head_works_on_is_waited_for(server: Queue) -> None:
    acquire(server.client, "job-0.0", "another head", "another")
    server.publish(0, 1)
    with head(server) as it:
        it.consume()
        server.wait_for_outcomes(1)
        time.sleep(1)
        assert it.engine.delivered == ["job-1.0"]
        release(server.client, "job-0.0", "another head")
        server.wait_for_outcomes(2)
        wait_until(server.settled)


def test_a_job_another_head_finished_meanwhile_is_not_generated_again(server: Queue) -> None:
    acquire(server.client, "job-0.0", "another head", "another")
    server.publish(0)
    with head(server) as it:
        it.consume()
        wait_until(lambda: server.unacked() == 1)
        server.client.set(keys.job("job-0.0"), "done")
        wait_until(server.settled)
        assert it.engine.delivered == []


def test_broken_connections_to_the_queue_server_lose_nothing(server: Queue) -> None:
    server.publish(*range(8))
    with head(server, delay_s=None) as it:
        it.consume()
        wait_until(lambda: it.live() == 8)
        server.client.client_kill_filter(_type="normal", skipme=True)
        it.engine.release()
        server.wait_for_outcomes(8)
        wait_until(server.settled, 60)
    assert sum(server.outcomes().values()) >= 8


def test_far_from_the_queue_server_nothing_is_lost_when_the_link_breaks(server: Queue) -> None:
    server.publish(*range(24))
    port = urlsplit(server.url).port
    assert port is not None
    with (
        LinkSimulator("127.0.0.1", port, LinkShape(delay_s=0.02)) as link,
        head(server, url=link.url_for(server.url), delay_s=0.3) as it,
    ):
        it.consume()
        wait_until(server.outcomes)
        link.cut()
        wait_until(lambda: not server.ready() and it.live() == 0, 60)
        # nothing was taken without being written down: the bookkeeper finds it there
        wait_until(lambda: len(it.engine.delivered) + server.unacked() == 24)
        restore_unacked(server.client, HEAD)
        server.wait_for_outcomes(24)
        wait_until(server.settled, 60)
    assert len(set(it.engine.delivered)) == len(it.engine.delivered) == 24


def test_half_open_connections_to_the_queue_server_lose_nothing(server: Queue) -> None:
    server.publish(*range(12))
    port = urlsplit(server.url).port
    assert port is not None
    with (
        LinkSimulator("127.0.0.1", port, LinkShape(delay_s=0.01)) as link,
        head(server, url=link.url_for(server.url), delay_s=0.5, count=1, total=4) as it,
    ):
        it.consume()
        wait_until(lambda: it.live() == 4)
        link.swallow(3.0)  # nothing arrives and nobody is told
        wait_until(lambda: sum(server.outcomes().values()) >= 4, 60)
        # what the server handed out into the void is the bookkeeper's to give back
        wait_until(lambda: not server.ready() and not it.live(), 60)
        restore_unacked(server.client, HEAD)
        server.wait_for_outcomes(12, 60)
        wait_until(server.settled, 60)
    assert len(set(it.engine.delivered)) == len(it.engine.delivered) == 12


def test_claims_on_messages_in_flight_are_renewed(server: Queue) -> None:
    settlements = Settlements(server.client, HEAD, lambda: None)
    index = keys.unacked_index(HEAD)
    server.client.zadd(index, {"taken": 1.0, "foreign": 1.0})
    settlements.take(SimpleNamespace(delivery_tag="taken"))
    settlements.take(SimpleNamespace(delivery_tag="restored meanwhile"))
    settlements.refresh()
    renewed = server.client.zscore(index, "taken")
    assert renewed is not None
    assert renewed > time.time() - 60
    assert server.client.zscore(index, "foreign") == 1.0
    assert server.client.zscore(index, "restored meanwhile") is None


def test_what_cannot_be_settled_is_left_to_the_bookkeeper_and_stops_no_other(
    server: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise ValueError("whatever")

    monkeypatch.setattr(front_settlements, "restore_unacked", fail)
    settlements = Settlements(server.client, HEAD, lambda: None)
    for tag, requeue in (("back", True), ("done", False)):
        server.client.hset(keys.unacked(HEAD), tag, "[]")
        settlements.take(SimpleNamespace(delivery_tag=tag))
        settlements.settle(SimpleNamespace(delivery_tag=tag), requeue=requeue)
        assert settlements.drain(5)
    assert server.client.hkeys(keys.unacked(HEAD)) == [b"back"]
    assert settlements.num_in_flight == 0
    assert "they come again" in caplog.text


@contextmanager
def events_of(server: Queue) -> Iterator[list[dict[str, Any]]]:
    """The live events, as Flower gets them."""
    events: list[dict[str, Any]] = []
    ended = threading.Event()
    app = make_app(server.settings)
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": events.append})

        def listen() -> None:
            with receiver.consumer_context() as (own_connection, _, _):
                while not ended.is_set():
                    with suppress(TimeoutError):
                        own_connection.drain_events(timeout=0.2)

        thread = threading.Thread(target=listen)
        thread.start()
        time.sleep(0.5)
        yield events
        ended.set()
        thread.join()


def test_flower_sees_rates_while_a_job_runs_and_at_its_end(server: Queue) -> None:
    with events_of(server) as events, head(server, delay_s=None) as it:

        def seen(kind: str) -> list[dict[str, Any]]:
            return [event for event in events if event["type"] == kind]

        server.publish(1)
        it.consume()
        wait_until(lambda: it.live() == 1)
        time.sleep(2.1)
        for tokens in (150, 151, 152):
            it.engine.server.progress("job-1.0", tokens, 31.2)
        wait_until(lambda: seen("task-progress"))
        it.engine.release()
        wait_until(lambda: seen("task-succeeded"))
        assert [event["result"] for event in seen("task-progress")] == ["tps=31.2 tokens=150"]
        assert seen("task-succeeded")[0]["result"].startswith("{'tps': 31.46")
        assert "prompt" not in seen("task-received")[0]["args"]
        assert seen("task-started")


def test_remote_control_is_not_told_prompts(server: Queue) -> None:
    server.publish(1)
    with head(server, delay_s=None, count=1) as it:
        it.consume()
        wait_until(lambda: it.live() == 1)
        told = make_app(server.settings).control.inspect(timeout=3.0, limit=1).active()
        assert told is not None
        (jobs,) = told.values()
        assert [job["id"] for job in jobs] == ["job-1.0"]
        assert "id-1" in str(jobs)
        assert "prompt" not in str(jobs)


def celery(server: Queue, *arguments: str) -> str:
    environment = {**os.environ, "SHARDQ_BROKER_URL": server.url}
    command = [sys.executable, "-m", "celery", "-A", "tasks.app", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_celerys_own_commands_see_the_fronts(server: Queue) -> None:
    server.publish(*range(3))
    with head(server):
        assert celery(server, "inspect", "ping", "--timeout", "3").count("pong") == 2
        assert "2 nodes online" in celery(server, "inspect", "active_queues", "--timeout", "3")
        assert "3 messages" in celery(server, "purge", "-f", "-Q", keys.queue(MODEL))
        assert server.ready() == 0


def test_a_head_needs_no_more_fronts_than_jobs() -> None:
    assert spread(20, 8) == [3, 3, 3, 3, 2, 2, 2, 2]
    assert spread(3, 8) == [1, 1, 1]
    assert sum(spread(concurrency(64), 8)) == concurrency(64) > 64
