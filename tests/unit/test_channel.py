"""The local socket between engine and fronts, both ends in this process."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import queue
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from pathlib import Path
from unittest.mock import Mock

import pytest

from tasks.generation import (
    Choice,
    FailureType,
    FinishReason,
    GenerationRequest,
    GenerationTask,
    Metrics,
    Outcome,
    StopReason,
)
from workers.head import channel
from workers.head.channel import EngineServer, private_address
from workers.head.channel_client import EngineClient, EngineLost, EngineUnreachable
from workers.head.channel_messages import (
    Consuming,
    Finished,
    HandedBack,
    MessageInvalid,
    Progress,
    Started,
    Submit,
    decode_to_engine,
    decode_to_front,
    encode,
)
from workers.head.registry import MAX_FINISHED_BYTES

KEY = b"k" * 32
METRICS = Metrics(1.0, 2.0, 0.1, 31.5, 4, 2.5, 16, 10, 0, 1000, 100, 0.1, 0.2, 0.3, 0.4)


def make_task(job: str = "job") -> GenerationTask:
    messages = ({"role": "user", "content": "ü"},)
    request = GenerationRequest(None, messages, seed=-(2**63), stop=("a", "b"))
    return GenerationTask(job, 1, "batch", "id-1", "model", request)


def make_outcome(job: str = "job") -> Outcome:
    return Outcome(job, 1, "head", "täxt", (5, 6), FinishReason.STOP, 7, None, None, METRICS)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


class Engine:
    """An engine that only notes what it is given."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.delivered: queue.Queue[GenerationTask] = queue.Queue()
        self.suspects: list[str] = []
        self.server = EngineServer(address, KEY, self._deliver)

    def _deliver(self, task: GenerationTask, suspect: bool) -> None:
        if suspect:
            self.suspects.append(task.task_id)
        self.delivered.put(task)

    @contextmanager
    def front(self) -> Iterator[EngineClient]:
        client = EngineClient(self.address, KEY, lambda on: None, lambda: None)
        try:
            yield client
        finally:
            client.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with private_address() as address:
        engine = Engine(address)
        yield engine
        engine.server.close()


def test_every_message_survives_the_trip() -> None:
    submit = Submit(make_task(), suspect=True)
    assert decode_to_engine(encode(submit)) == submit
    for message in (
        Consuming(True),
        Started("job.1"),
        Progress("job.1", 12, 3.5),
        Progress("job.1", 0, None),
        Finished("job.1", make_outcome()),
        Finished("job.1", dataclasses.replace(make_outcome(), stopped=StopReason.EXPIRED)),
        HandedBack("job.1"),
    ):
        assert decode_to_front(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x93\x01", encode(Consuming(True))[:-1], b"\x91\xa6submit", b"\x92\xa6submit\x80"],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode_to_engine(data)
    with pytest.raises(MessageInvalid):
        decode_to_front(data)


def test_the_socket_is_only_for_its_user(engine: Engine) -> None:
    assert stat.S_IMODE(Path(engine.address).parent.stat().st_mode) == 0o700


def test_a_wrong_key_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineUnreachable):
        EngineClient(engine.address, b"wrong", lambda on: None, lambda: None)
    assert engine.server.num_fronts == 0


def test_no_engine_is_an_error_of_its_own() -> None:
    with private_address() as address, pytest.raises(EngineUnreachable):
        EngineClient(address, KEY, lambda on: None, lambda: None)


def test_what_a_killed_engine_left_is_swept_away_and_a_living_ones_socket_is_not(tmp_path: Path) -> None:
    left, living, fresh = (tmp_path / f"shardq-{name}" for name in ("aaaaaaaa", "bbbbbbbb", "cccccccc"))
    for directory in (left, living, fresh):
        directory.mkdir()
        (directory / "lock").touch()
        (directory / "engine").touch()
    for directory in (left, living):
        os.utime(directory / "lock", (0, 0))
    with (living / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        channel.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == [living, fresh]


def test_a_new_address_is_not_swept_away_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_address() as address:
        os.utime(Path(address).parent / "lock", (0, 0))
        with private_address():
            assert Path(address).parent.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_task_is_followed_from_submission_to_outcome(engine: Engine) -> None:
    with engine.front() as front:
        generation = front.submit(make_task())
        assert engine.delivered.get(timeout=5) == make_task()
        engine.server.started("job.1")
        engine.server.progress("job.1", 3, None)
        engine.server.finish("job.1", make_outcome())
        events = [generation.next_event() for _ in range(3)]
    assert events == [Started("job.1"), Progress("job.1", 3, None), Finished("job.1", make_outcome())]


def test_a_second_delivery_to_another_front_joins_the_first(engine: Engine) -> None:
    with engine.front() as one, engine.front() as two:
        first = one.submit(make_task())
        engine.delivered.get(timeout=5)
        engine.server.started("job.1")
        assert first.next_event() == Started("job.1")
        second = two.submit(make_task())
        assert second.next_event() == Started("job.1")
        engine.server.finish("job.1", make_outcome())
        assert first.next_event() == second.next_event() == Finished("job.1", make_outcome())
    assert engine.delivered.empty()


def test_a_second_delivery_to_the_same_front_joins_too(engine: Engine) -> None:
    with engine.front() as front:
        first, second = front.submit(make_task()), front.submit(make_task())
        engine.delivered.get(timeout=5)
        engine.server.finish("job.1", make_outcome())
        assert first.next_event() == second.next_event() == Finished("job.1", make_outcome())
    assert engine.delivered.empty()


def test_a_delivery_after_the_end_gets_the_remembered_outcome(engine: Engine) -> None:
    with engine.front() as front:
        front.submit(make_task())
        engine.delivered.get(timeout=5)
    engine.server.finish("job.1", make_outcome())
    with engine.front() as other:
        assert other.submit(make_task()).next_event() == Finished("job.1", make_outcome())
    assert engine.delivered.empty()


def test_a_job_handed_back_is_delivered_anew(engine: Engine) -> None:
    with engine.front() as front:
        generation = front.submit(make_task())
        engine.delivered.get(timeout=5)
        engine.server.hand_back("job.1")
        assert generation.next_event() == HandedBack("job.1")
        front.submit(make_task())
        assert engine.delivered.get(timeout=5).task_id == "job.1"


def test_fronts_stop_taking_before_they_hear_that_a_job_is_handed_back(engine: Engine) -> None:
    heard: list[bool] = []
    front = EngineClient(engine.address, KEY, heard.append, lambda: None)
    engine.server.set_consuming(True)
    generation = front.submit(make_task())
    engine.delivered.get(timeout=5)
    engine.server.hand_back("job.1")
    assert generation.next_event() == HandedBack("job.1")
    assert heard[-2:] == [True, False]
    assert not engine.server.consuming
    front.close()


def test_fronts_hear_whether_to_consume_when_they_join_and_when_it_changes(engine: Engine) -> None:
    heard: queue.Queue[bool] = queue.Queue()
    front = EngineClient(engine.address, KEY, heard.put, lambda: None)
    assert heard.get(timeout=5) is False
    engine.server.set_consuming(True)
    assert heard.get(timeout=5) is True
    late = EngineClient(engine.address, KEY, heard.put, lambda: None)
    assert heard.get(timeout=5) is True
    engine.server.set_consuming(True)
    engine.server.set_consuming(False)
    assert [heard.get(timeout=5) for _ in range(2)] == [False, False]
    front.close()
    late.close()


def test_the_engine_is_told_of_a_suspect(engine: Engine) -> None:
    with engine.front() as front:
        front.submit(make_task("good"))
        front.submit(make_task("suspect"), suspect=True)
        engine.delivered.get(timeout=5)
        engine.delivered.get(timeout=5)
    assert engine.suspects == ["suspect.1"]


def test_with_the_engine_everything_it_worked_on_is_lost(engine: Engine) -> None:
    lost = threading.Event()
    front = EngineClient(engine.address, KEY, lambda on: None, lost.set)
    generation = front.submit(make_task())
    engine.delivered.get(timeout=5)
    engine.server.close()
    assert generation.next_event() == EngineLost("job.1")
    assert lost.wait(5)
    assert front.submit(make_task("other")).next_event() == EngineLost("other.1")
    front.close()


def test_a_front_that_stops_hands_back_what_it_waits_for(engine: Engine) -> None:
    with engine.front() as front:
        generation = front.submit(make_task())
        engine.delivered.get(timeout=5)
        front.hand_back()
        assert generation.next_event() == HandedBack("job.1")
        assert front.submit(make_task("late")).next_event() == HandedBack("late.1")
    assert engine.server.live() == ("job.1",)


def test_a_leaving_front_leaves_its_jobs_live(engine: Engine) -> None:
    with engine.front() as front:
        front.submit(make_task())
        engine.delivered.get(timeout=5)
    wait_until(lambda: engine.server.num_fronts == 0)
    assert engine.server.live() == ("job.1",)
    engine.server.started("job.1")
    engine.server.finish("job.1", make_outcome())
    assert engine.server.live() == ()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_front_is_accepted_after_one_could_not_be(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    failures = [OSError(number, "no"), OSError(number, "no")]

    class Failing(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return super().accept()

    monkeypatch.setattr(channel, "ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(socket, "socket", Failing)
    with private_address() as address:
        engine = Engine(address)
        with engine.front() as front:
            front.submit(make_task())
            assert engine.delivered.get(timeout=5) == make_task()
        engine.server.close()
    assert not failures


def test_a_front_for_which_no_thread_is_free_is_cut_off_and_the_next_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(channel, "_FrontLink", Mock(side_effect=OSError(errno.EMFILE, "no")))
        with pytest.raises(EngineUnreachable):
            EngineClient(engine.address, KEY, lambda on: None, lambda: None)
    with engine.front() as front:
        front.submit(make_task())
        assert engine.delivered.get(timeout=5) == make_task()


def test_an_engine_closes_while_it_can_accept_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "no")

    def exhausted(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "no")

    monkeypatch.setattr(channel, "ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(socket, "socket", Full)
    with private_address() as address:
        server = EngineServer(address, KEY, lambda task, suspect: None)
        monkeypatch.setattr(socket, "socket", exhausted)
        server.close()
        assert not Path(address).exists()


def test_garbage_from_one_front_costs_only_that_front(engine: Engine) -> None:
    with engine.front() as good:
        bad = Client(engine.address, family="AF_UNIX", authkey=KEY)
        bad.recv_bytes()
        bad.send_bytes(b"\xc1")
        with pytest.raises(EOFError):
            bad.recv_bytes()
        bad.close()
        good.submit(make_task())
        assert engine.delivered.get(timeout=5) == make_task()


def test_one_that_never_answers_the_challenge_keeps_nobody_out(engine: Engine) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(engine.address)
        with engine.front() as front:
            front.submit(make_task())
            assert engine.delivered.get(timeout=5) == make_task()


def test_a_front_that_does_not_read_is_cut_off_and_delays_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_UNREAD_BYTES", 1 << 20)
    frozen = Client(engine.address, family="AF_UNIX", authkey=KEY)
    frozen.recv_bytes()
    frozen.send_bytes(encode(Submit(make_task(), suspect=False)))
    engine.delivered.get(timeout=5)
    started = time.monotonic()
    for number in range(60_000):
        engine.server.progress("job.1", number, 1.0)
    assert time.monotonic() - started < 5
    wait_until(lambda: engine.server.num_fronts == 0)
    frozen.close()


def test_an_outcome_too_large_for_a_message_fails_its_job_once_and_costs_nobody_else_anything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 2000)
    choice = Choice("", (100_000,) * 300, FinishReason.LENGTH)
    large = dataclasses.replace(make_outcome("large"), choices=(choice, choice))
    with engine.front() as front:
        generation, other = front.submit(make_task("large")), front.submit(make_task("other"))
        for _ in range(2):
            engine.delivered.get(timeout=5)
        engine.server.finish("large.1", large)
        engine.server.finish("other.1", make_outcome("other"))
        finished = generation.next_event()
        assert other.next_event() == Finished("other.1", make_outcome("other"))
        assert front.submit(make_task("large")).next_event() == finished
    assert isinstance(finished, Finished)
    told = finished.outcome
    assert (told.failure, told.text, told.token_ids, told.choices) == (FailureType.OUTCOME_TOO_LARGE, None, (), ())
    assert (told.metrics, told.prompt_tokens) == (METRICS, 7)
    assert told.failure_message is not None
    assert "3 completions, 602 tokens" in told.failure_message
    assert "a message 2000 at most" in told.failure_message
    assert engine.delivered.empty()
    assert told.failure_message in caplog.text


def test_a_stopped_job_whose_text_is_too_large_stays_stopped() -> None:
    stopped = dataclasses.replace(make_outcome(), finish_reason=None, stopped=StopReason.CANCELLED)
    bare = stopped.without_texts("too large")
    assert (bare.stopped, bare.failure, bare.text) == (StopReason.CANCELLED, None, None)


def test_the_largest_message_is_remembered_and_waits_for_a_front_that_still_reads() -> None:
    assert channel.MAX_MESSAGE_BYTES <= MAX_FINISHED_BYTES
    assert channel.MAX_MESSAGE_BYTES < channel.MAX_UNREAD_BYTES


def test_closing_twice_is_fine() -> None:
    with private_address() as address:
        server = EngineServer(address, KEY, lambda task, suspect: None)
        server.close()
        server.close()
        assert not Path(address).exists()
