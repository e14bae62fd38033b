"""The head's sessions: what it makes of tails that die, and of tails that are slow; stops, suspects and the drain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from relay.errors import LinkLost, RelayRefused, RelayUnreachable
from relay.memory import MemoryHub, MemoryRelay
from relay.messages import FRAME_VERSION, Hello, Welcome
from relay.transport import HeadLink, Lease, TailInfo
from tasks import stops
from tasks.generation import LONG_CHARACTERS, FailureType, GenerationRequest, GenerationTask, Outcome, StopReason
from tests.relay_messages import PROFILE, tail_info
from workers.head.courier import GIVE_UP_AFTER_S, Courier, TailSilent
from workers.head.ensemble import Ensemble
from workers.head.intake import Intake
from workers.head.jobs import Job
from workers.head.session import HeadOffer, TailSearch
from workers.head.stops import StopWatch
from workers.head.worker import MAX_PATIENCE_S, HeadWorker


class Sessions:
    """A search that finds a session as often as `ends` says how one ends."""

    obstacle = "no tail is there"

    def __init__(self, ends: list[LinkLost], stop: threading.Event) -> None:
        self.left, self.stop = list(ends), stop
        self.blamed: list[str] = []

    def wait(self, stop: threading.Event, timeout_s: float | None, meanwhile: Callable[[], None] = lambda: None) -> Any:
        meanwhile()
        if not self.left or stop.is_set():
            self.stop.set()
            return None
        return Mock(**{"lease.epoch": 1, "lease.tail.tail": f"tail-0000000{len(self.left)}"})

    def failed(self, tail: str) -> None:
        self.blamed.append(tail)


class Engine:
    """Every epoch of it ends at its first step."""

    vocab_size = 7
    wants_jobs = True

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.patience: list[float] = []
        self.num_looks = 0
        self.num_handed_back = 0

    def open(self, courier: Courier, slots: int, *, tail_id: str) -> None:
        self.patience.append(courier.give_up_after_s)

    def step(self) -> None:
        raise self.sessions.left.pop(0)

    def apply_stops(self) -> None:
        self.num_looks += 1

    def hand_back_all(self) -> None:
        self.num_handed_back += 1


@pytest.mark.parametrize(
    ("ends", "patience"),
    [
        ([TailSilent("slow")] * 3, [30, 60, 120]),
        ([TailSilent("slow"), LinkLost("died"), TailSilent("slow")], [30, 60, 30]),
        ([TailSilent("slow")] * 8, [30, 60, 120, 240, 480, 600, 600, 600]),
    ],
)
def test_a_tail_that_was_too_slow_for_a_frame_gets_longer_in_the_next_epoch(
    ends: list[LinkLost], patience: list[float]
) -> None:
    assert (GIVE_UP_AFTER_S, MAX_PATIENCE_S) == (30, 600)
    stop = threading.Event()
    sessions = Sessions(ends, stop)
    engine = Engine(sessions)
    HeadWorker(engine, Mock(), Mock()).serve(sessions, stop, None)  # type: ignore[arg-type]
    assert engine.patience == patience


def test_jobs_are_stopped_while_there_is_no_tail_and_the_tail_that_was_lost_is_remembered() -> None:
    stop = threading.Event()
    sessions = Sessions([LinkLost("died"), LinkLost("died")], stop)
    engine = Engine(sessions)
    HeadWorker(engine, Mock(), Mock()).serve(sessions, stop, None)  # type: ignore[arg-type]
    assert engine.num_looks == 2
    assert sessions.blamed == ["tail-00000002", "tail-00000001"]


def test_a_head_that_gave_up_on_tails_keeps_no_job_that_is_brought_to_it_later() -> None:
    class NoOther(Sessions):
        """The tail that is lost was the only one."""

        def wait(
            self, stop: threading.Event, timeout_s: float | None, meanwhile: Callable[[], None] = lambda: None
        ) -> Any:
            if self.left:
                return super().wait(stop, timeout_s)
            for _ in range(3):
                meanwhile()
            if timeout_s is None:
                stop.set()
            return None

    stop = threading.Event()
    sessions = NoOther([LinkLost("died")], stop)
    engine = Engine(sessions)
    HeadWorker(engine, Mock(), Mock()).serve(sessions, stop, None)  # type: ignore[arg-type]
    assert (engine.num_looks, engine.num_handed_back) == (6, 1 + 3)


class Steps:
    """An engine that steps `count` times and then sets `stop`; a suspect has it from the second step to the third."""

    vocab_size = 7
    has_closed = False

    def __init__(self, stop: threading.Event, count: int) -> None:
        self.stop, self.count, self.done = stop, count, 0
        self.calls: list[str] = []

    def open(self, courier: Courier, slots: int, *, tail_id: str) -> None: ...

    @property
    def wants_jobs(self) -> bool:
        return self.done not in (2, 3)

    def step(self) -> None:
        self.done += 1
        self.calls.append("step")
        if self.done == self.count:
            self.stop.set()

    def apply_stops(self) -> None: ...

    def hand_back_waiting(self) -> None:
        self.calls.append("hand back waiting")


class Draining:
    """Fronts that need as many steps as are left to end."""

    def __init__(self, engine: Steps) -> None:
        self.engine = engine

    def close(self) -> None:
        deadline = time.monotonic() + 5
        while self.engine.done < 8 and time.monotonic() < deadline:
            time.sleep(0.001)


def test_no_jobs_are_taken_beside_a_suspect_and_a_drain_steps_on_until_the_fronts_have_ended() -> None:
    stop = threading.Event()
    engine, server = Steps(stop, 5), Mock()
    sessions = Sessions([LinkLost("unused")], stop)
    HeadWorker(engine, server, Draining(engine)).serve(sessions, stop, None)  # type: ignore[arg-type]
    said = [call.args[0] for call in server.set_consuming.call_args_list]
    assert said[:5] == [True, True, False, False, True]
    assert said[5:] == [False, False]
    assert engine.calls[:6] == ["step"] * 5 + ["hand back waiting"]
    assert engine.done >= 8
    assert sessions.blamed == []


# -- looking for a tail -----------------------------------------------------------------------------------------


class Relay(MemoryRelay):
    """A relay on which chosen tails refuse chosen calls."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub)
        self.connect_error: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.answers = True

    def connect(self, lease: Lease, hello: Hello) -> HeadLink:
        tail = lease.tail.tail
        self.asked.append(tail)
        if tail in self.connect_error:
            raise self.connect_error[tail]
        link = super().connect(lease, hello)
        if self.answers:
            self._hub.epochs[tail].down.deliver(0, _welcome(tail, hello.epoch))
        return link


def _welcome(tail: str, epoch: int) -> bytes:
    from relay.codec import encode

    return encode(Welcome(tail, epoch))


OFFER = HeadOffer("head", PROFILE, 2, 8, 1, 64)


def relay_with(*names: str) -> tuple[Relay, list[TailInfo]]:
    hub = MemoryHub()
    tails = [tail_info(name) for name in names]
    for tail in tails:
        MemoryRelay(hub).announce(tail)
        hub.tails[tail.tail] = tail
    return Relay(hub), tails


def test_a_tail_that_failed_is_tried_after_all_others() -> None:
    relay, (first, second, third) = relay_with("a", "b", "c")
    search, stop = TailSearch(relay, OFFER), threading.Event()
    found = []
    for _ in range(5):
        session = search.find(stop)
        assert session is not None
        found.append(session.lease.tail)
        session.close()
        search.failed(session.lease.tail.tail)
    assert found == [first, second, third, first, second]


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ({"split": 3}, "split: 3 ≠ 2 (give both the same --split)"),
        ({"split": None}, "split: not chosen yet ≠ 2 (give both the same --split)"),
        ({"slots": 4}, "slots: 4 < 8 (give both the same --slots)"),
        ({"max_query": 8}, "max_query: 8 < 64 (give both the same version of shardq)"),
        ({"dtype": "float16"}, "dtype: float16 ≠ float32 (give both the same --dtype)"),
        (
            {"fingerprint": "0" * 64},
            f"fingerprint: {'0' * 12} ≠ {PROFILE.fingerprint[:12]} (give both the same --model)",
        ),
        ({"quantization": "nf4"}, f"quantization: nf4 ≠ {PROFILE.quantization} (give both the same --quantization)"),
        ({"context": 99}, f"context: 99 ≠ {PROFILE.context} (give both the same --max-length)"),
        ({"split": 3, "slots": 4}, "split: 3 ≠ 2; slots: 4 < 8 (give both the same --split, --slots)"),
    ],
)
def test_a_tail_that_does_not_fit_is_named_with_both_sides_and_the_mend(tail: dict[str, Any], said: str) -> None:
    of_profile = {name: tail[name] for name in tail if name in PROFILE.to_json()}
    of_tail = {name: tail[name] for name in tail if name not in of_profile}
    fitting = replace(tail_info(), split=2, slots=8, max_query=64)
    offer = HeadOffer("h", PROFILE, split=2, slots=8, lanes=1, max_query=64)
    assert offer.misfit(fitting) is None
    found = offer.misfit(replace(fitting, profile=replace(PROFILE, **of_profile), **of_tail))
    assert found == f"tail {fitting.tail} and head h differ: {said}"


@pytest.mark.parametrize(("frames", "older"), [(FRAME_VERSION + 1, "head h"), (FRAME_VERSION - 1, "tail")])
def test_where_the_frames_differ_nothing_else_is_compared_and_the_older_side_is_to_be_upgraded(
    frames: int, older: str
) -> None:
    other = replace(tail_info(), split=9, frames=frames)
    found = HeadOffer("h", PROFILE, split=2, slots=8, lanes=1, max_query=64).misfit(other)
    assert found == (
        f"tail {other.tail} speaks frames of version {frames}, head h of version {FRAME_VERSION} (upgrade the {older})"
    )


def test_every_tail_that_stands_in_the_way_is_named_until_one_is_found() -> None:
    relay, (few, taken) = relay_with("a", "b")
    search = TailSearch(relay, replace(OFFER, slots=few.slots + 1))
    assert search.find(threading.Event()) is None
    assert all(tail.tail in str(search.obstacle) for tail in (few, taken))
    search = TailSearch(relay, OFFER)
    assert search.find(threading.Event()) is not None
    assert search.obstacle is None


@pytest.mark.parametrize("error", [LinkLost("a newer epoch was opened"), RelayRefused("no such right")])
def test_what_goes_wrong_with_one_tail_gives_its_lease_back_and_leads_to_the_next_one(error: Exception) -> None:
    relay, (bad, good) = relay_with("a", "b")
    relay.connect_error[bad.tail] = error
    session = TailSearch(relay, OFFER).find(threading.Event())
    assert session is not None
    assert session.lease.tail == good
    assert MemoryRelay(relay._hub).lease("another head", bad) is not None


def test_a_relay_that_is_away_while_an_epoch_opens_leaves_no_lease_behind_and_is_waited_for() -> None:
    relay, (tail,) = relay_with("a")
    relay.connect_error[tail.tail] = RelayUnreachable("no answer")
    search, stop = TailSearch(relay, OFFER), threading.Event()
    assert search.wait(stop, 0.2) is None
    assert "no answer" in str(search.obstacle)
    relay.connect_error.clear()
    assert search.wait(stop, 5) is not None


def test_a_tail_that_is_gone_before_it_answers_is_not_waited_for() -> None:
    relay, (tail,) = relay_with("a")
    relay.answers = False
    threading.Timer(0.3, relay._hub.vanish, (tail.tail,)).start()
    search, began = TailSearch(relay, OFFER), time.monotonic()
    assert search.find(threading.Event()) is None
    assert time.monotonic() - began < 5
    assert "is gone" in str(search.obstacle)


def test_a_search_ends_soon_after_it_is_stopped_even_while_a_tail_is_silent() -> None:
    relay, _ = relay_with("a")
    relay.answers = False
    stop, began = threading.Event(), time.monotonic()
    threading.Timer(0.3, stop.set).start()
    assert TailSearch(relay, OFFER).wait(stop, None) is None
    assert time.monotonic() - began < 5


# -- stops ------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_stop_watch_tells_of_live_jobs_and_asks_on_while_the_queue_server_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, ...]] = []
    told: list[tuple[str, StopReason]] = []

    def flagged(client: redis.Redis, task_ids: tuple[str, ...]) -> dict[str, StopReason]:
        asked.append(task_ids)
        if len(asked) in (2, 3):
            raise redis.ConnectionError("away")
        return {"b.1": StopReason.CANCELLED}

    monkeypatch.setattr(stops, "flagged", flagged)
    live: list[str] = []
    with caplog.at_level(logging.WARNING):
        watch = StopWatch(Mock(), lambda: tuple(live), lambda *stop: told.append(stop), every_s=0.01)
        time.sleep(0.1)
        assert asked == []  # nothing is live: nothing to ask
        live += ["a.1", "b.1"]
        wait_until(lambda: len(told) >= 3)
        watch.close()
        watch.close()
    assert set(asked) == {("a.1", "b.1")}
    assert set(told) == {("b.1", StopReason.CANCELLED)}
    assert caplog.text.count("away") == 1


# -- the door ---------------------------------------------------------------------------------------------------


class Prompts:
    """Reads one prompt in its own way, and a long one when it is let."""

    def __init__(self) -> None:
        self.may_read_long = threading.Event()

    def read_all(self, task: GenerationTask) -> Ensemble:
        if len(str(task.request.prompt)) > LONG_CHARACTERS:
            assert self.may_read_long.wait(30)
        if task.request.prompt == "broken":
            raise TypeError("can only concatenate str")
        return Ensemble(tuple(Mock(spec=Job, suspect=False) for _ in range(2)))


def test_a_prompt_that_breaks_its_reader_fails_alone_and_a_suspect_is_marked() -> None:
    intake = Intake(Prompts(), "head")  # type: ignore[arg-type]
    for number, (prompt, suspect) in enumerate([("broken", False), ("good", True), ("good", False)]):
        request = GenerationRequest(prompt, None, 0)
        intake.deliver(GenerationTask(f"job{number}", 1, "batch", "c", "m", request), suspect)
    broken, suspect, usual = intake.take(), intake.take(), intake.take()
    assert isinstance(broken, Outcome)
    assert (broken.failure, broken.job) == (FailureType.INTERNAL, "job0")
    assert "can only concatenate str" in str(broken.failure_message)
    assert isinstance(suspect, Ensemble)
    assert all(job.suspect for job in suspect.jobs)
    assert isinstance(usual, Ensemble)
    assert not any(job.suspect for job in usual.jobs)


def test_a_long_prompt_holds_up_neither_who_delivers_it_nor_other_prompts() -> None:
    prompts = Prompts()
    intake = Intake(prompts, "head")  # type: ignore[arg-type]
    long = GenerationRequest(None, ({"role": "user", "content": "x" * LONG_CHARACTERS},), 0)
    requests = [GenerationRequest("x" * (LONG_CHARACTERS + 1), None, 0), long, GenerationRequest("short", None, 0)]
    for number, request in enumerate(requests):
        intake.deliver(GenerationTask(f"job{number}", 1, "batch", "c", "m", request))
    assert intake.take() is not None
    assert intake.take() is None
    prompts.may_read_long.set()
    wait_until(lambda: intake.num_waiting == 2)
