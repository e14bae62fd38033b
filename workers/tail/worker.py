"""The tail process: announce, accept epochs, answer their frames."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from relay import keys
from relay.errors import FrameInvalid, LinkLost, RelayError, RelayUnreachable
from relay.messages import Error, ErrorReason, Hello, Prefill, Release, Round, Verdict, Welcome
from relay.streams import RedisRelay
from relay.transport import Announcement, Received, Relay, TailInfo, TailLink
from workers.agreement import split_for_tail
from workers.engine.shard import TailShard
from workers.engine.slottables import SlotTables
from workers.engine.source import Part
from workers.pauses import exempt_loaded
from workers.progress import log_progress
from workers.room import Machine, checked_slots
from workers.served import ServedModel
from workers.settings import MAX_QUERY, TailSettings
from workers.tail.engine import TailEngine
from workers.tail.gauge import TailGauge
from workers.tail.line import Line

log = logging.getLogger(__name__)

#: how often an idle tail looks for a new epoch and for its end
POLL_S = 0.2
#: how often a tail tries again what the relay did not do
RETRY_S = 1.0


def run(settings: TailSettings, stop: threading.Event) -> None:
    """Serve as a tail until `stop` is set. Raises WorkerError or RelayError when it cannot start.

    Once its half is loaded, a relay that is away is waited for, however long that takes.
    """
    relay = RedisRelay(settings.relay_url, allow_insecure=settings.allow_insecure)
    try:
        relay.ping()
        tail = settle(relay, settings, stop)
        if tail is None:
            return
        served = ServedModel.resolve(settings.model_copy(update={"split": tail.split}), Part.TAIL, log_progress)
        shard = served.load_tail(slots=tail.slots, max_query=MAX_QUERY)
        exempt_loaded()
        TailWorker(relay, tail, shard).serve(stop)
    finally:
        relay.close()


def settle(relay: Relay, settings: TailSettings, stop: threading.Event) -> TailInfo | None:
    """What the tail will announce, split and slots chosen, before anything is loaded; None once `stop` is set.

    Raises WorkerError, for lack of memory too, and RelayError.
    """
    described = ServedModel.resolve(settings, Part.DESCRIPTION, log_progress)
    machine = Machine.described(settings, described.directory, Part.TAIL, max_query=MAX_QUERY)
    tail = TailInfo(
        tail=keys.new_tail_id(settings.tail_name),
        profile=described.profile,
        split=described.split,
        slots=0,
        max_query=MAX_QUERY,
        pulse=time.time(),
    )
    split = described.split
    if settings.split == "auto":
        room = machine.room(settings.slots)
        waiting = replace(tail, split=None, slots=room.slots, room=room)
        agreed = split_for_tail(relay, waiting, machine.sizes, room, stop)
        if agreed is None:
            return None
        split = agreed
    return replace(tail, split=split, slots=checked_slots(machine, settings.slots, split))


class TailWorker:
    """The life of one tail over its epochs: at most one is open, the newest."""

    def __init__(self, relay: Relay, tail: TailInfo, shard: TailShard) -> None:
        self._relay = relay
        self._tail = tail
        self._shard = shard
        self._tables = SlotTables(shard.slots, shard.vocab_size, shard.device)
        self._epoch = 0
        self._link: TailLink | None = None
        self._engine: TailEngine | None = None
        self._line = Line()
        self._gauge = TailGauge(shard.device)
        self._opening = _Outage("no epoch can be opened")

    def serve(self, stop: threading.Event) -> None:
        """Announce the tail and answer frames until `stop` is set. Raises RelayRefused."""
        presence = self._announce(stop)
        if presence is None:
            return
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

    def _announce(self, stop: threading.Event) -> Announcement | None:
        """Make the tail known, as soon as the relay answers; None if `stop` was set before."""
        outage = _Outage("this tail cannot be announced")
        while not stop.is_set():
            try:
                presence = self._relay.announce(self._tail)
            except RelayUnreachable as error:
                outage.goes_on(error)
                stop.wait(RETRY_S)
            else:
                outage.is_over()
                return presence
        return None

    def _turn(self, stop: threading.Event) -> None:
        """Answer what waits, as far as it runs as one; wait a moment if nothing does."""
        if self._link is None or self._engine is None:
            stop.wait(POLL_S)
            return
        try:
            self._fetch(self._link)
        except LinkLost as error:
            log.warning("epoch %d is over: %s", self._epoch, error)
            self._close_link()
            return
        if self._line:
            self._answer(self._link, self._engine)

    def _fetch(self, link: TailLink) -> None:
        """Move everything that has arrived into the line. Raises LinkLost."""
        received = link.receive(0.0 if self._line else POLL_S)
        while received is not None:
            if isinstance(received.message, Prefill | Round | Release):
                self._line.put(Received(received.lane, received.message, received.num_bytes, received.at))
            received = link.receive(0.0)

    def _answer(self, link: TailLink, engine: TailEngine) -> None:
        try:
            answers = answer_next(self._line, engine)
        except Exception as error:
            # The head must not wait for a tail that is about to die of this.
            self._give_up(link, error)
            raise
        try:
            for lane, verdict in answers:
                link.send(lane, self._gauge.marked(verdict))
        except FrameInvalid as error:
            # A head asks for no more than fits a verdict; one that does costs us its epoch, not our life.
            log.warning("epoch %d is over: %s", self._epoch, error)
            self._give_up(link, error)
            self._engine, self._line = None, Line()  # as after a refusal the link stays up

    def _give_up(self, link: TailLink, error: Exception) -> None:
        link.send(0, Error(self._epoch, ErrorReason.TAIL_FAILED, f"tail {self._tail.tail}: {error!r}"))

    def _open(self, hello: Hello) -> None:
        """Start the epoch that `hello` asks for, or refuse it; the previous epoch is over either way.

        Where the relay does not let us, the next turn tries again.
        """
        self._close_link()
        try:
            link = self._relay.accept(self._tail.tail, hello)
        except RelayError as error:
            self._opening.goes_on(error)
            return
        self._opening.is_over()
        self._epoch, self._link = hello.epoch, link
        refusal = refuse(self._tail, hello)
        if refusal is not None:
            log.warning("refused head %s: %s", hello.head, refusal.message)
            link.send(0, refusal)  # the link stays up to the next hello: closing it now might drop what it sends
            return
        log.info("epoch %d: head %s with %d slots", hello.epoch, hello.head, hello.slots)
        self._engine = TailEngine(self._shard, slots=hello.slots, max_query=hello.max_query, tables=self._tables)
        link.send(0, Welcome(self._tail.tail, hello.epoch))

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._engine = None
        self._line = Line()


def answer_next(line: Line, engine: TailEngine) -> list[tuple[int, Verdict]]:
    """Work on what the line gives next: the lanes and verdicts to send."""
    taken = line.take()
    verdicts = engine.answer_all([received.message for received in taken])
    return [_timed(received, verdict) for received, verdict in zip(taken, verdicts, strict=True)]


def _timed(received: Received[Any], verdict: Verdict) -> tuple[int, Verdict]:
    """What of the frame's time here was not its own work, it waited."""
    waited_s = time.perf_counter() - received.at - verdict.tail_s
    return received.lane, replace(verdict, waited_s=max(0.0, waited_s))


class _HelloWatcher(threading.Thread):
    """Keeps a read for hellos outstanding, so that the round loop never waits for one."""

    def __init__(self, relay: Relay, tail: str, stop: threading.Event) -> None:
        super().__init__(name="hello-watcher", daemon=True)
        self._relay, self._tail, self._stop_event = relay, tail, stop
        self._newest: Hello | None = None

    def newest(self) -> Hello | None:
        return self._newest

    def run(self) -> None:
        outage = _Outage("no hello can be heard")
        while not self._stop_event.is_set():
            epoch = self._newest.epoch if self._newest else 0
            try:
                self._newest = self._relay.await_hello(self._tail, epoch, 1.0) or self._newest
                outage.is_over()
            except RelayError as error:
                outage.goes_on(error)
                self._stop_event.wait(RETRY_S)


class _Outage:
    """Something that is tried until it works: one line when it begins to fail, and one when that is over."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def goes_on(self, error: RelayError) -> None:
        """It failed."""
        if not self._failing:
            log.warning("%s: %s; trying on", self._what, error)
        self._failing = True

    def is_over(self) -> None:
        """It worked."""
        if self._failing:
            log.info("%s: over", self._what)
        self._failing = False


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
