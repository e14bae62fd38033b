"""A batch under way while its wire server, its connections or its tail go away: it goes on, and no text changes.

Head and tail are the real ones, over a real server; their halves of a model are those of `test_protocol`, slowed down.
"""

from __future__ import annotations

import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import torch

from relay.embedded import EmbeddedRedis
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import TailInfo
from tests.integration.test_relay_contract import QUICK, link, loses
from tests.integration.test_relay_streams import numbers
from tests.pair import Line, Outcomes, options
from tests.redis_server import running_redis
from tests.relay_messages import PROFILE, round_of, tail_info
from tests.unit.test_protocol import FakeDrafter, FakeHead, FakeTail, job, reference
from workers.head.engine import HeadEngine
from workers.head.jobs import Job
from workers.head.session import HeadOffer, TailSearch
from workers.head.worker import HeadWorker
from workers.tail.worker import TailWorker

SLOTS, LANES = 2, 2
OFFER = HeadOffer("gpu-a", PROFILE, 2, SLOTS, LANES, 64)


class SlowTail(FakeTail):
    """So slow that a batch is still under way when something happens to it."""

    def __init__(self, forward_s: float) -> None:
        super().__init__(8)
        self.forward_s = forward_s

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        return super().forward(hidden, slots, starts)


class Returning(Outcomes):
    """Puts what is handed back into the line again, and knows when which job ended."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line
        self.ended_at: list[float] = []

    def finish(self, task_id: str, outcome: object) -> None:
        super().finish(task_id, outcome)  # type: ignore[arg-type]
        self.ended_at.append(time.monotonic())

    def hand_back(self, task_id: str) -> None:
        self.line.append(a_job(int(task_id.removeprefix("job").split(".")[0])))


PROMPT, COUNT = [1, 2, 3], 40


def a_job(number: int) -> Job:
    return job(number, [*PROMPT, number % 11], COUNT)


@dataclass
class Batch:
    """A head that works through jobs in a thread, and its tails in theirs."""

    outcomes: Returning
    num_jobs: int
    tails: list[TailInfo] = field(default_factory=list)

    def wait_ended(self, count: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.outcomes.finished) < count:
            assert time.monotonic() < deadline, f"{len(self.outcomes.finished)} of {count} jobs have ended"
            time.sleep(0.01)

    def wait_all(self) -> None:
        """Every job has ended with the text that it has undisturbed."""
        self.wait_ended(self.num_jobs)
        for number in range(self.num_jobs):
            outcome = self.outcomes.finished[f"job{number}.1"]
            assert outcome.failure is None, outcome.failure_message
            assert list(outcome.token_ids) == reference([*PROMPT, number % 11], COUNT)

    def next_end_after(self, moment: float) -> float:
        """When the first job ended that ended later than `moment`, in seconds since then."""
        count = len([at for at in self.outcomes.ended_at if at <= moment])
        self.wait_ended(count + 1)
        return self.outcomes.ended_at[count] - moment


@contextmanager
def running_tail(url: str, settings: RelaySettings, name: str, forward_s: float = 0.01) -> Iterator[TailInfo]:
    """A tail in a thread; it ends with the context, in order."""
    info, stop = tail_info(name), threading.Event()
    with closing(RedisRelay(url, settings=settings)) as relay:
        worker = TailWorker(relay, info, SlowTail(forward_s))  # type: ignore[arg-type]
        thread = threading.Thread(target=worker.serve, args=(stop,), daemon=True)
        thread.start()
        try:
            yield info
        finally:
            alive = thread.is_alive()
            stop.set()
            thread.join(20)
            assert alive, "the tail ended by itself"
            assert not thread.is_alive(), "the tail does not end"


@contextmanager
def running_batch(url: str, settings: RelaySettings, num_jobs: int) -> Iterator[Batch]:
    """A head that works on so many jobs."""
    line, stop = Line(a_job(number) for number in range(num_jobs)), threading.Event()
    outcomes = Returning(line)
    engine = HeadEngine(
        FakeHead(SLOTS),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 0.3),
        line,
        outcomes,
        options(slots=SLOTS, draft_length=2, lanes=LANES),
    )
    with closing(RedisRelay(url, settings=settings)) as relay:
        worker = HeadWorker(engine, Mock(), Mock())
        args = (TailSearch(relay, OFFER), stop, None)
        thread = threading.Thread(target=worker.serve, args=args, daemon=True)
        thread.start()
        try:
            yield Batch(outcomes, num_jobs)
        finally:
            alive = thread.is_alive()
            stop.set()
            thread.join(20)
            assert alive, "the head ended by itself"
            assert not thread.is_alive(), "the head does not end"


class Proxy:
    """A TCP proxy whose connections can be made half-open: they stay, and nothing comes through any more."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._dead: set[socket.socket] = set()
        self.swallowing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """All connections of now are half-open; new ones work."""
        self._dead |= {end for pair in self._pairs for end in pair}

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)
        for end in (self._listener, *(end for pair in self._pairs for end in pair)):
            end.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while not self._closed.is_set():
                for key, _ in selector.select(0.05):
                    if key.data is None:
                        self._accept(selector)
                    else:
                        self._carry(selector, key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._pairs.append((near, far))
        if self.swallowing:
            self._dead |= {near, far}
        selector.register(near, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, near)

    def _carry(self, selector: selectors.BaseSelector, source: socket.socket, target: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if source in self._dead:
                if not data:
                    selector.unregister(source)
                return
            if data:
                target.sendall(data)
                return
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()
        selector.unregister(source)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A wire server that the test may stop and start."""
    with running_redis(tmp_path / "wire") as server:
        yield server


def test_a_wire_server_that_restarts_empty_is_found_again_by_both_and_no_text_changes(server: EmbeddedRedis) -> None:
    with running_tail(server.url, QUICK, "gpu-b"), running_batch(server.url, QUICK, 12) as batch:
        for done in (2, 5):
            batch.wait_ended(done)
            server.stop()
            server.start()
            assert batch.next_end_after(time.monotonic()) < 15
        batch.wait_all()


def test_a_wire_server_that_is_away_for_longer_than_anyones_patience_ends_neither_head_nor_tail(
    server: EmbeddedRedis,
) -> None:
    with running_tail(server.url, QUICK, "gpu-b"), running_batch(server.url, QUICK, 6) as batch:
        batch.wait_ended(2)
        server.stop()
        time.sleep(2 * QUICK.patience_s)
        server.start()
        assert batch.next_end_after(time.monotonic()) < 15
        batch.wait_all()


def test_a_tail_that_starts_before_its_server_waits_for_it(server: EmbeddedRedis) -> None:
    server.stop()
    with running_tail(server.url, QUICK, "gpu-b"), running_batch(server.url, QUICK, 2) as batch:
        time.sleep(1.0)
        server.start()
        batch.wait_all()


def test_a_tail_is_replaced_under_a_running_batch(redis_url: str) -> None:
    with running_batch(redis_url, QUICK, 12) as batch:
        for number in range(3):
            with running_tail(redis_url, QUICK, f"gpu-{number}"):
                batch.wait_ended(3 * (number + 1))
        with running_tail(redis_url, QUICK, "gpu-last"):
            batch.wait_all()


def test_a_standby_tail_takes_over_within_15_seconds_of_the_first_ones_death(redis_url: str) -> None:
    settings = RelaySettings()  # as in production
    with closing(Proxy(redis_url)) as proxy, running_tail(proxy.url, settings, "a-first") as first:
        with running_batch(redis_url, settings, 6) as batch:
            batch.wait_ended(1)
            with running_tail(redis_url, settings, "b-standby"):
                proxy.swallowing = True  # as if its machine had lost its power
                proxy.freeze()
                died = time.monotonic()
                assert batch.next_end_after(died + 2) < 13
                batch.wait_all()
            with closing(RedisRelay(redis_url)) as relay:
                assert first.tail not in [tail.tail for tail in relay.tails()]
        proxy.swallowing = False


@pytest.mark.parametrize("side", ["head", "tail", "both"])
def test_half_open_connections_are_noticed_within_seconds_and_cost_no_epoch(redis_url: str, side: str) -> None:
    settings = RelaySettings()  # as in production
    with (
        closing(Proxy(redis_url)) as near,
        closing(Proxy(redis_url)) as far,
        closing(RedisRelay(near.url, settings=settings)) as head,
        closing(RedisRelay(far.url, settings=settings)) as tail,
    ):
        linked = link(head, tail)
        linked.head_end.send(0, round_of(1))
        assert numbers(linked.tail_end, 1) == [1]
        for proxy in {"head": [near], "tail": [far], "both": [near, far]}[side]:
            proxy.freeze()
        began = time.monotonic()
        for number in range(2, 6):
            linked.head_end.send(0, round_of(number))
        assert numbers(linked.tail_end, 4) == [2, 3, 4, 5]
        assert time.monotonic() - began < 9
        while time.monotonic() - began < 12:  # longer than presence and lease live without renewal
            assert linked.lease.held()
            time.sleep(0.1)
        assert [found.tail for found in head.tails()] == [linked.tail.tail]


def test_a_link_on_which_nothing_comes_through_any_more_is_lost_within_seconds(redis_url: str) -> None:
    with (
        closing(Proxy(redis_url)) as proxy,
        closing(RedisRelay(redis_url, settings=RelaySettings())) as tail,
        closing(RedisRelay(proxy.url, settings=RelaySettings())) as head,
    ):
        linked = link(head, tail)
        proxy.swallowing = True
        proxy.freeze()
        loses(linked.head_end, within_s=20)
        assert not linked.lease.held()
