"""How a front's Celery consumer differs from a plain one: it pauses, and it waits for fewer round trips.

A plain consumer fetches a message, writes it down as unacknowledged, publishes its events and acknowledges
finished ones all in one loop, waiting for the queue server each time. Here acknowledgements and events leave
that loop, which then waits twice per message. A refresher keeps messages in flight from coming again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import bootsteps
from celery.worker.request import Request

from tasks import keys
from tasks.app import VISIBILITY_TIMEOUT_S
from workers.head.background import Background

logger = logging.getLogger(__name__)

#: threads that acknowledge and hand back; handing back takes three round trips per message
SETTLE_THREADS = 4
#: seconds that events are collected before they are published together
EVENTS_S = 0.2
#: events collected at most before the thread that brings one more publishes them itself
MAX_EVENTS = 1000
#: seconds that shutting down waits for outstanding acknowledgements
DRAIN_S = 10.0
#: seconds between two renewals of the claims on messages in flight
REFRESH_S = VISIBILITY_TIMEOUT_S / 4


class Settlements:
    """Messages taken from the queue until they are acknowledged or handed back. Thread-safe."""

    def __init__(self) -> None:
        self._background = Background("settle", SETTLE_THREADS)
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()

    def take(self, delivery_tag: str) -> None:
        """A message was taken."""
        with self._lock:
            self._in_flight.add(delivery_tag)

    def settle(self, delivery_tag: str, call: Callable[[], None]) -> None:
        """Soon acknowledge, drop or hand back a message: `call` does it and waits for the queue server."""

        def settle() -> None:
            try:
                call()
            finally:
                with self._lock:
                    self._in_flight.discard(delivery_tag)

        self._background.do(settle)

    def in_flight(self) -> list[str]:
        """Delivery tags of the messages not yet settled."""
        with self._lock:
            return list(self._in_flight)

    def drain(self, timeout_s: float) -> bool:
        """Wait for outstanding settlements; False if they take longer."""
        return self._background.drain(timeout_s)


def request_class(settlements: Settlements, wake: Callable[[], None]) -> type[Any]:
    """Celery's `Request` with acknowledgements outside the consumer's loop.

    `wake` turns that loop once: a settled message gives it credit to fetch another.
    """

    class FrontRequest(Request):  # type: ignore[misc]
        def __init__(self, message: Any, **options: Any) -> None:
            super().__init__(message, **options)
            settlements.take(message.delivery_tag)

        def acknowledge(self) -> None:
            if not self.acknowledged:
                self.acknowledged = True
                message, errors = self.message, self.connection_errors
                self._settle(lambda: message.ack_log_error(logger, errors))

        def reject(self, requeue: bool = False) -> None:
            if not self.acknowledged:
                self.acknowledged = True
                message, errors = self.message, self.connection_errors
                self._settle(lambda: message.reject_log_error(logger, errors, requeue))
                self.send_event("task-rejected", requeue=requeue)

        def _settle(self, call: Callable[[], None]) -> None:
            def settle() -> None:
                call()
                wake()

            settlements.settle(self.message.delivery_tag, settle)

    return FrontRequest


class EventPublisher:
    """Publishes a dispatcher's collected events from a thread of its own."""

    def __init__(self) -> None:
        self._dispatcher: Any = None
        self._wanted = threading.Event()
        threading.Thread(target=self._publish, name="events", daemon=True).start()

    def serve(self, dispatcher: Any) -> None:
        """Publish for this dispatcher from now on; a consumer has a new one after each reconnection."""
        dispatcher.on_send_buffered = self._wanted.set
        dispatcher.buffer_limit = MAX_EVENTS
        self._dispatcher = dispatcher

    def send(self, kind: str, **fields: Any) -> None:
        """Send an event of the `task` group."""
        if self._dispatcher is not None:
            self._dispatcher.send(kind, **fields)

    def _publish(self) -> None:
        while True:
            self._wanted.wait()
            time.sleep(EVENTS_S)
            self._wanted.clear()
            try:
                self._dispatcher.flush()
            except Exception:  # whatever the broker's client raises: live events are no reason to stop
                logger.exception("events not published")


def refresh(client: redis.Redis, head_id: str | None, settlements: Settlements) -> None:
    """Renew the claims on this front's messages in flight, if the claims still stand. One round trip."""
    tags = settlements.in_flight()
    if tags:
        now = time.time()
        client.zadd(keys.unacked_index(head_id), dict.fromkeys(tags, now), xx=True)


def keep_refreshed(
    client: redis.Redis, head_id: str | None, settlements: Settlements, interval_s: float = REFRESH_S
) -> None:
    """Start the daemon thread that refreshes every `interval_s`."""

    def work() -> None:
        while True:
            time.sleep(interval_s)
            try:
                refresh(client, head_id, settlements)
            except redis.RedisError as error:
                logger.warning("claims on messages not renewed: %s", error)

    threading.Thread(target=work, name="unacked-refresh", daemon=True).start()


class Gate:
    """Whether the consumer takes messages: closed at first. Thread-safe once attached to a consumer.

    While closed the consumer does not read the queue at all. A message that was on its way when the gate
    closed is put back.
    """

    def __init__(self, queue_name: str) -> None:
        self._queue_name = queue_name
        self._open = False
        self._consumer: Any = None

    def set_open(self, on: bool) -> None:
        """Open or close; takes effect in the consumer's loop."""
        self._open = on
        if self._consumer is not None:
            self._consumer.call_soon(self._apply)

    def attach(self, consumer: Any) -> None:
        """Guard this consumer, in its own thread: it has just connected and not read yet."""
        self._consumer = consumer
        self._apply()

    def wake(self) -> None:
        """Turn the consumer's loop once."""
        if self._consumer is not None:
            self._consumer.call_soon(_nothing)

    def _apply(self) -> None:
        consumer = self._consumer
        if consumer.task_consumer is None:
            return  # between two connections; `attach` comes again
        if self._open:
            consumer.add_task_queue(self._queue_name)
        else:
            consumer.cancel_task_queue(self._queue_name)


def _nothing() -> None:
    """What the loop is woken with."""


def consumer_step(gate: Gate, events: EventPublisher, settlements: Settlements) -> type[Any]:
    """The step that fits gate, events and settlements into Celery's consumer each time it connects."""

    class FrontStep(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, consumer: Any) -> None:
            if consumer.event_dispatcher is not None:
                events.serve(consumer.event_dispatcher)
            gate.attach(consumer)

        def stop(self, consumer: Any) -> None:
            pass

        def shutdown(self, consumer: Any) -> None:
            if not settlements.drain(DRAIN_S):
                logger.warning("shutting down with acknowledgements outstanding; their messages come again")

    return FrontStep
