"""The texts of running jobs, for whoever looks on: asked for by a key that lapses, told on a stream that does.

Nothing is published of a job that nobody follows.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from tasks import keys

#: milliseconds that a wish to follow stands; whoever follows renews it
FOLLOW_MS = 6_000
#: increments kept of one task, and for how many seconds
KEPT = 256
KEPT_S = 60


@dataclass(frozen=True, slots=True)
class Increment:
    """What was committed of a text.

    Heads that begin a job anew begin again at position 0, so that increments may say what was said before.
    """

    choice: int
    #: characters of the text before this
    position: int
    text: str


def follow(client: redis.Redis, task_id: str) -> None:
    """Begin to follow, or ask for the whole text once more."""
    client.set(keys.follow(task_id), secrets.token_hex(8), px=FOLLOW_MS)


def go_on(client: redis.Redis, task_id: str) -> None:
    """Renew the wish; begin anew if it has lapsed."""
    if not client.pexpire(keys.follow(task_id), FOLLOW_MS):
        follow(client, task_id)


def followed(client: redis.Redis, task_ids: Sequence[str]) -> dict[str, bytes]:
    """Those of the task ids that somebody follows → a value that changes when somebody begins. One round trip."""
    values: Any = client.mget([keys.follow(task_id) for task_id in task_ids]) if task_ids else []
    return {task_id: value for task_id, value in zip(task_ids, values, strict=True) if value is not None}


def publish(client: redis.Redis, task_id: str, increments: Sequence[Increment], *, anew: bool) -> None:
    """Tell what was committed; `anew`: these begin with the whole text, so what was told before can go."""
    pipeline = client.pipeline(transaction=False)
    stream = keys.followed_text(task_id)
    for number, increment in enumerate(increments):
        fields: Any = {"choice": increment.choice, "position": increment.position, "text": increment.text}
        pipeline.xadd(stream, fields, maxlen=1 if anew and number == 0 else KEPT, approximate=False)
    pipeline.expire(stream, KEPT_S)
    pipeline.execute()


def told(client: redis.Redis, task_id: str, after: str) -> list[tuple[str, Increment]]:
    """What was told after the entry `after` (`0` for all that is kept), with the ids of the entries."""
    entries: Any = client.xrange(keys.followed_text(task_id), min=f"({after}")
    return [(entry.decode(), _increment(fields)) for entry, fields in entries]


def _increment(fields: dict[bytes, bytes]) -> Increment:
    return Increment(int(fields[b"choice"]), int(fields[b"position"]), fields[b"text"].decode(errors="replace"))
