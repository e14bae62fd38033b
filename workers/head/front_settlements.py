"""Messages a front has taken, until they are acknowledged or handed back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from tasks import keys
from tasks.connection import Outage
from tasks.heads import restore_unacked

logger = logging.getLogger(__name__)

#: messages settled together at most
_MOST_AT_ONCE = 100
#: seconds between two attempts at a queue server that does not answer
_RETRY_S = 1.0

# By the server's clock, like the time at which it was taken: any change shows that somebody holds the message.
_REFRESH = """#!lua flags=allow-oom
local now = redis.call('TIME')
for _, tag in ipairs(ARGV) do redis.call('ZADD', KEYS[1], 'XX', now[1] + now[2] / 1e6, tag) end
"""


@dataclass(frozen=True, slots=True)
class _Settlement:
    #: kombu's message
    message: Any
    requeue: bool


class Settlements:
    """Acknowledges and hands back from a thread of its own, many messages per round trip. Thread-safe.

    Kombu waits for one round trip per acknowledgement and for three per message handed back, in a transaction
    that fails whenever another front touches the same hash. Same keys and same effect here, and no dependence on
    the consumer's connection: what is in flight outlives that. `wake` is called when messages have been settled:
    the consumer may then fetch others.
    """

    def __init__(self, client: redis.Redis, head_id: str | None, wake: Callable[[], None]) -> None:
        self._client = client
        self._head_id = head_id
        self._wake = wake
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()
        self._outage = Outage(logger, "finished jobs are not acknowledged yet")
        self._wanted: queue.Queue[_Settlement] = queue.Queue()
        threading.Thread(target=self._work, name="settle", daemon=True).start()

    @property
    def num_in_flight(self) -> int:
        """Messages fetched and not settled yet."""
        with self._lock:
            return len(self._in_flight)

    def take(self, message: Any) -> None:
        """The consumer fetched this message."""
        with self._lock:
            self._in_flight.add(message.delivery_tag)

    def settle(self, message: Any, *, requeue: bool) -> None:
        """Soon take the message off the queue server for good, or put it back where it is served next."""
        self._wanted.put(_Settlement(message, requeue))

    def refresh(self) -> None:
        """Renew the claims on messages in flight, as far as they still stand. One round trip."""
        with self._lock:
            tags = list(self._in_flight)
        if tags:
            self._client.eval(_REFRESH, 1, keys.unacked_index(self._head_id), *tags)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything asked for is settled; False if it takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._wanted.all_tasks_done:
            while self._wanted.unfinished_tasks:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._wanted.all_tasks_done.wait(remaining)
        return True

    def _work(self) -> None:
        while True:
            settlements = [self._wanted.get()]
            while len(settlements) < _MOST_AT_ONCE and not self._wanted.empty():
                settlements.append(self._wanted.get())
            try:
                self._insist(settlements)
            except Exception:  # this thread alone settles: without it the front would take jobs and never end one
                logger.exception("messages not settled; nobody claims them any more, they come again")
            self._forget(settlements)
            self._wake()
            for _ in settlements:
                self._wanted.task_done()

    def _insist(self, settlements: list[_Settlement]) -> None:
        while True:
            try:
                self._settle(settlements)
            except redis.RedisError as error:
                self._outage.failed(error)
                time.sleep(_RETRY_S)
            else:
                return self._outage.over()

    def _settle(self, settlements: list[_Settlement]) -> None:
        done = [it.message.delivery_tag for it in settlements if not it.requeue]
        back = [it.message.delivery_tag for it in settlements if it.requeue]
        if done:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.zrem(keys.unacked_index(self._head_id), *done)
            pipeline.hdel(keys.unacked(self._head_id), *done)
            pipeline.execute()
        if back:
            restore_unacked(self._client, self._head_id, back)

    def _forget(self, settlements: list[_Settlement]) -> None:
        with self._lock:
            self._in_flight.difference_update(it.message.delivery_tag for it in settlements)
