"""The tail process: announce, accept epochs, answer their frames."""

from __future__ import annotations

import logging
import threading
import time

from relay import keys
from relay.errors import LinkLost, RelayUnreachable
from relay.messages import Error, ErrorReason, Hello, Prefill, Release, Round, Verdict, Welcome
from relay.streams import RedisRelay
from relay.transport import Relay, TailInfo, TailLink
from workers.engine.shard import TailShard
from workers.engine.source import Part
from workers.progress import log_progress
from workers.served import ServedModel
from workers.settings import MAX_QUERY, TailSettings
from workers.signals import stop_on_signals
from workers.tail.engine import TailEngine

log = logging.getLogger(__name__)

#: how often an idle tail looks for a new epoch and for its end
POLL_S = 0.2


def run(settings: TailSettings) -> None:
    """Serve as a tail until SIGTERM or SIGINT. Raises WorkerError or RelayError when it cannot start."""
    stop = stop_on_signals()
    relay = RedisRelay(settings.relay_url, allow_insecure=settings.allow_insecure)
    try:
        relay.ping()
        served = ServedModel.resolve(settings, Part.TAIL, log_progress)
        shard = served.load_tail(slots=settings.slots, max_query=MAX_QUERY)
        tail = TailInfo(
            tail=keys.new_tail_id(settings.tail_name),
            profile=served.profile,
            split=served.split,
            slots=settings.slots,
            max_query=MAX_QUERY,
            pulse=time.time(),
        )
        TailWorker(relay, tail, shard).serve(stop)
    finally:
        relay.close()


class TailWorker:
    """The life of one tail over its epochs: at most one is open, the newest."""

    def __init__(self, relay: Relay, tail: TailInfo, shard: TailShard) -> None:
        self._relay = relay
        self._tail = tail
        self._shard = shard
        self._epoch = 0
        self._link: TailLink | None = None
        self._engine: TailEngine | None = None

    def serve(self, stop: threading.Event) -> None:
        """Announce the tail and answer frames until `stop` is set."""
        presence = self._relay.announce(self._tail)
        watcher = _HelloWatcher(self._relay, self._tail.tail, stop)
        watcher.start()
        log.info("tail %s waits for a head (layers from %d)", self._tail.tail, self._tail.split)
        try:
            while not stop.is_set():
                presence.pulse()
                hello = watcher.newest()
                if hello is not None and hello.epoch > self._epoch:
                    self._open(hello)
                self._turn(stop)
        finally:
            presence.close()
            self._close_link()
            watcher.join(timeout=5)

    def _turn(self, stop: threading.Event) -> None:
        """Answer the next frame, or wait a moment for one."""
        if self._link is None or self._engine is None:
            stop.wait(POLL_S)
            return
        try:
            received = self._link.receive(POLL_S)
        except LinkLost as error:
            log.warning("epoch %d is over: %s", self._epoch, error)
            self._close_link()
            return
        if received is not None and isinstance(received.message, Prefill | Round | Release):
            self._link.send(received.lane, self._answer(self._link, self._engine, received.message))

    def _answer(self, link: TailLink, engine: TailEngine, frame: Prefill | Round | Release) -> Verdict:
        try:
            return engine.answer(frame)
        except Exception as error:
            # The head must not wait for a tail that is about to die of this (out of memory, say).
            link.send(0, Error(self._epoch, ErrorReason.TAIL_FAILED, f"tail {self._tail.tail}: {error!r}"))
            raise

    def _open(self, hello: Hello) -> None:
        """Start the epoch that `hello` asks for, or refuse it; the previous epoch is over either way."""
        self._close_link()
        self._epoch = hello.epoch
        link = self._relay.accept(self._tail.tail, hello)
        refusal = refuse(self._tail, hello)
        if refusal is not None:
            log.warning("refused head %s: %s", hello.head, refusal.message)
            link.send(0, refusal)
            link.close()
            return
        log.info("epoch %d: head %s with %d slots", hello.epoch, hello.head, hello.slots)
        self._engine = TailEngine(self._shard, slots=hello.slots, max_query=hello.max_query)
        self._link = link
        link.send(0, Welcome(self._tail.tail, hello.epoch))

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._engine = None


class _HelloWatcher(threading.Thread):
    """Keeps a read for hellos outstanding, so that the round loop never waits for one."""

    def __init__(self, relay: Relay, tail: str, stop: threading.Event) -> None:
        super().__init__(name="hello-watcher", daemon=True)
        self._relay, self._tail, self._stop_event = relay, tail, stop
        self._newest: Hello | None = None

    def newest(self) -> Hello | None:
        return self._newest

    def run(self) -> None:
        reachable = True
        while not self._stop_event.is_set():
            epoch = self._newest.epoch if self._newest else 0
            try:
                self._newest = self._relay.await_hello(self._tail, epoch, 1.0) or self._newest
                reachable = True
            except RelayUnreachable as error:
                if reachable:
                    log.warning("no relay: %s", error)
                reachable = False
                self._stop_event.wait(1.0)


def refuse(tail: TailInfo, hello: Hello) -> Error | None:
    """Why this tail cannot serve the head that says hello, naming both sides; None when it can."""
    differences = tail.profile.differences(hello.profile)
    checks = (
        (bool(differences), ErrorReason.PROFILE_MISMATCH, "; ".join(differences)),
        (hello.split != tail.split, ErrorReason.SPLIT_MISMATCH, f"split: {tail.split} ≠ {hello.split}"),
        (
            hello.slots > tail.slots,
            ErrorReason.TOO_MANY_SLOTS,
            f"slots: at most {tail.slots}, not {hello.slots}",
        ),
        (
            hello.max_query > tail.max_query,
            ErrorReason.QUERY_TOO_LONG,
            f"tokens per frame and row: at most {tail.max_query}, not {hello.max_query}",
        ),
    )
    for failed, reason, text in checks:
        if failed:
            return Error(hello.epoch, reason, f"tail {tail.tail} and head {hello.head} differ: {text}")
    return None
