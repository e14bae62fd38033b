"""The head's voice for onlookers: asks which of its jobs somebody follows, and publishes what is new of their texts."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import redis

from tasks import following
from tasks.following import Increment
from workers.head.shown import ShownTexts

log = logging.getLogger(__name__)

#: seconds between two looks for followers
LOOK_S = 1.0
#: seconds between two publications while somebody follows
PUBLISH_S = 0.2


class FollowWatch:
    """Serves followers on a thread of its own, until closed.

    `live` gives the ids of the tasks that the engine knows, `wake` lets it look at what is wanted of it.
    """

    def __init__(
        self,
        client: redis.Redis,
        live: Callable[[], tuple[str, ...]],
        shown: ShownTexts,
        wake: Callable[[], None],
        look_s: float = LOOK_S,
    ) -> None:
        self._client = client
        self._live = live
        self._shown = shown
        self._wake = wake
        self._look_s = look_s
        self._look_at = 0.0
        #: followed task → the value of its wish; it changes with a new follower, who wants the whole text
        self._wishes: dict[str, bytes] = {}
        #: characters published, by task and choice
        self._published: dict[tuple[str, int], int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="follow-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        self._closing.set()
        # an answer that does not come must not hold up the end
        self._thread.join(timeout=self._look_s)

    def _serve(self) -> None:
        answered = True
        while not self._closing.wait(min(PUBLISH_S, self._look_s) if self._wishes else self._look_s):
            try:
                self._turn(time.monotonic())
            except redis.RedisError as error:
                if answered:
                    log.warning("followers cannot be served: %s; trying on", error)
                answered = False
            except Exception:  # outermost loop of the thread: without it no job could be followed any more
                log.exception("followers not served")
            else:
                answered = True

    def _turn(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + self._look_s
            self._look()
        self._publish()

    def _look(self) -> None:
        """Ask who is followed, and have the engine show the texts of those who are newly."""
        before, self._wishes = self._wishes, following.followed(self._client, self._live())
        anew = [task_id for task_id, wish in self._wishes.items() if before.get(task_id) != wish]
        self._published = {
            (task_id, choice): number
            for (task_id, choice), number in self._published.items()
            if task_id in self._wishes and task_id not in anew
        }
        self._shown.follow(self._wishes, anew)
        if anew:
            self._wake()

    def _publish(self) -> None:
        texts: dict[str, dict[int, str]] = defaultdict(dict)
        for (task_id, choice), text in self._shown.take().items():
            texts[task_id][choice] = text
        for task_id, by_choice in texts.items():
            increments = [new for choice, text in by_choice.items() if (new := self._new(task_id, choice, text)).text]
            if increments:
                anew = not any(task == task_id for task, _ in self._published)
                following.publish(self._client, task_id, increments, anew=anew)
            # after the server has taken them: what it refused is told with the next
            for choice, text in by_choice.items():
                self._published[task_id, choice] = len(text)

    def _new(self, task_id: str, choice: int, text: str) -> Increment:
        """What is new; all of it if the text was begun anew and is shorter than what was told."""
        start = self._published.get((task_id, choice), 0)
        start = start if start <= len(text) else 0
        return Increment(choice, start, text[start:])
