"""The head's ear for stops: asks each second which of its jobs shall end before their text does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import redis

from tasks import stops
from tasks.generation import StopReason

log = logging.getLogger(__name__)

#: seconds between two looks
EVERY_S = 1.0


class StopWatch:
    """Asks the queue server for stops of the live jobs on a thread of its own, until closed.

    `live` gives the ids of the tasks that the engine knows, `stop` is told every one of them that shall end, each
    time anew as long as it is live: whoever missed it hears it again. Both are called from the thread.
    """

    def __init__(
        self,
        client: redis.Redis,
        live: Callable[[], tuple[str, ...]],
        stop: Callable[[str, StopReason], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._client = client
        self._live = live
        self._stop = stop
        self._every_s = every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking; safe to call twice."""
        self._closing.set()
        # an answer that does not come must not hold up the end
        self._thread.join(timeout=self._every_s)

    def _watch(self) -> None:
        answered = True
        while not self._closing.wait(self._every_s):
            try:
                self._look()
            except redis.RedisError as error:
                if answered:
                    log.warning("the queue server does not tell which jobs shall stop: %s; asking on", error)
                answered = False
            except Exception:  # outermost loop of the thread: without it no job could be stopped any more
                log.exception("stops not looked up")
            else:
                answered = True

    def _look(self) -> None:
        live = self._live()
        if live:
            for task_id, reason in stops.flagged(self._client, live).items():
                self._stop(task_id, reason)
