"""How a front's Celery consumer differs from a plain one: it pauses, and it waits for fewer round trips.

A plain consumer publishes its events and acknowledges finished messages in the loop that fetches others, waiting
for the queue server each time. Here both leave that loop. A refresher tells the bookkeeper that messages in flight
are held.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import redis
from celery import bootsteps
from celery.worker.request import Request

from tasks.connection import Outage
from workers.head.front_settlements import Settlements

logger = logging.getLogger(__name__)

#: seconds that events are collected before they are published together
EVENTS_S = 0.2
#: events collected at most before the thread that brings one more publishes them itself
MAX_EVENTS = 1000
#: seconds that shutting down waits for outstanding acknowledgements
DRAIN_S = 10.0
#: what dashboards show of a job that waits in the queue once more
HANDED_BACK = "waits in the queue again"
#: seconds between two renewals of the claims on messages in flight: a quarter of `tasks.restorer.OVERDUE_S`
REFRESH_S = 2.5


def request_class(settlements: Settlements) -> type[Any]:
    """Celery's `Request` with acknowledgements outside the consumer's loop."""

    class FrontRequest(Request):  # type: ignore[misc]
        acknowledged: bool

        def __init__(self, message: Any, **options: Any) -> None:
            super().__init__(message, **options)
            settlements.take(message)

        def acknowledge(self) -> None:
            if not self.acknowledged:
                self.acknowledged = True
                settlements.settle(self.message, requeue=False)

        def reject(self, requeue: bool = False) -> None:
            if not self.acknowledged:
                self.acknowledged = True
                settlements.settle(self.message, requeue=requeue)
                self._show_rejected(requeue)

        def info(self, safe: bool = False) -> dict[str, Any]:
            """What remote control is told: never the arguments themselves, which hold the prompt."""
            told: dict[str, Any] = super().info(safe=True)
            return told

        def _show_rejected(self, requeue: bool) -> None:
            if requeue:
                # "rejected" would leave a started job as started in dashboards; after "retried" all else counts
                self.send_event("task-retried", exception=HANDED_BACK, traceback=None, result=HANDED_BACK)
            else:
                self.send_event("task-rejected", requeue=False)

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


def keep_refreshed(settlements: Settlements, interval_s: float = REFRESH_S) -> None:
    """Start the daemon thread that renews the claims on messages in flight every `interval_s`."""

    outage = Outage(logger, "claims on messages are not renewed")

    def work() -> None:
        while True:
            time.sleep(interval_s)
            try:
                settlements.refresh()
            except redis.RedisError as error:
                outage.failed(error)
            else:
                outage.over()

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
        # Declared whether open or not: only to a declared queue can a message be put back. Opening later then
        # waits for no round trip.
        consumer.add_task_queue(self._queue_name)
        consumer.task_consumer.auto_declare = False
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
