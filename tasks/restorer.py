"""Give back what heads and fronts that are gone had taken and never acknowledged.

A message in flight is renewed every few seconds by the front that holds it, and a head's presence by the head. What
has stopped moving is given back. Whether it moves is seen by looking again, not by comparing times: no two clocks
need to agree, and no clock needs to be right. Delivering a message again that is held after all does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis

from tasks import keys, lease, queues
from tasks.app import VISIBILITY_TIMEOUT_S
from tasks.heads import PRESENCE_MS, forget_head, presences, restore_unacked

log = logging.getLogger(__name__)

#: seconds after which a message that no front renews is given back
OVERDUE_S = 10.0
#: seconds for which a head must be without presence: the server's clock may have jumped past one beat
GONE_S = 3.0
#: seconds between two looks that count at most: while nobody looked, the server may have been away for all
LONGEST_GAP_S = 2.0

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Seen:
    value: object
    #: seconds of watching since it last changed
    still_s: float


class _Watch(Generic[K]):
    """For how long each of some values has been seen unchanged."""

    def __init__(self) -> None:
        self._seen: dict[K, _Seen] = {}

    def look(self, values: dict[K, Any], elapsed_s: float) -> dict[K, float]:
        """Seconds for which each value has stood still; names that are missing now are forgotten."""
        seen = {}
        for name, value in values.items():
            before = self._seen.get(name)
            still_s = before.still_s + elapsed_s if before is not None and before.value == value else 0.0
            seen[name] = _Seen(value, still_s)
        self._seen = seen
        return {name: it.still_s for name, it in seen.items()}


class Restorer:
    """Looks at all heads and all messages in flight, again and again; see the module."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._looked: float | None = None
        self._start_over()

    def turn(self, now: float) -> int:
        """One look; the number of messages given back. `now`: seconds of any steady clock."""
        elapsed_s = 0.0 if self._looked is None else min(now - self._looked, LONGEST_GAP_S)
        try:
            restored = self._look(elapsed_s)
        except BaseException:
            self._start_over()
            raise
        self._looked = now
        return restored

    def _start_over(self) -> None:
        self._looked = None
        self._heads: _Watch[str] = _Watch()
        self._claims: _Watch[tuple[str | None, bytes]] = _Watch()

    def _look(self, elapsed_s: float) -> int:
        beats = presences(self._client)
        still = self._heads.look(beats, elapsed_s)
        gone = [head for head, beat in beats.items() if still[head] >= (PRESENCE_MS / 1000 if beat else GONE_S)]
        restored = sum(self._give_back_all(head) for head in gone)
        return restored + self._give_back_overdue([None, *(beats.keys() - set(gone))], elapsed_s)

    def _give_back_all(self, head_id: str) -> int:
        """The head is gone, and its jobs are free for others."""
        task_ids = list(queues.unacked_ids(self._client, head_id))
        lease.release_all(self._client, task_ids, head_id)
        moved = restore_unacked(self._client, head_id)
        if moved:
            log.warning("head %s is gone: %d jobs it had taken are queued again", head_id, moved)
        forget_head(self._client, head_id)
        return moved

    def _give_back_overdue(self, head_ids: list[str | None], elapsed_s: float) -> int:
        """A front of a living head is gone, or a reply with messages never arrived."""
        pipeline = self._client.pipeline(transaction=False)
        for head_id in head_ids:
            pipeline.zrange(keys.unacked_index(head_id), 0, -1, withscores=True)
        taken = {
            (head_id, tag): score
            for head_id, claims in zip(head_ids, pipeline.execute(), strict=True)
            for tag, score in claims
        }
        overdue: dict[str | None, list[str]] = {}
        for (head_id, tag), still_s in self._claims.look(taken, elapsed_s).items():
            if still_s >= _patience_s(head_id):
                overdue.setdefault(head_id, []).append(tag.decode())
        return sum(self._give_back(head_id, tags) for head_id, tags in overdue.items())

    def _give_back(self, head_id: str | None, tags: list[str]) -> int:
        moved = restore_unacked(self._client, head_id, tags)
        log.warning("%d jobs that nobody holds at %s any more are queued again", moved, head_id or keys.NO_HEAD)
        return moved


def _patience_s(head_id: str | None) -> float:
    """A Celery worker that is no head renews nothing."""
    return VISIBILITY_TIMEOUT_S if head_id is None else OVERDUE_S
