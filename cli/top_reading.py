"""What `shardq top` looks at: the queue server, as anybody who may submit can see it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import redis

from cli.reasons import standing_still
from tasks import keys, queues
from tasks.heads import HeadInfo, live_heads, registered_models


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """One served name."""

    model: str
    #: jobs that no head has taken
    queued: int
    #: jobs that hold a slot, and slots, of its heads that are alive
    running: int
    slots: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The system at one moment."""

    heads: tuple[HeadInfo, ...]
    queues: tuple[QueueDepth, ...]
    #: whether a bookkeeper is alive, and records that it has not written yet
    bookkeeper: bool
    unrecorded: int
    #: bytes of the queue server's memory, and its limit; 0: none
    memory_used: int
    memory_max: int
    #: what stands still, and the next step
    obstacles: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def read(client: redis.Redis) -> Reading:
    """Look once. Raises redis.RedisError."""
    heads = live_heads(client)
    models = sorted({*registered_models(client), *(head.model for head in heads)})
    memory: dict[str, Any] = client.info("memory")
    return Reading(
        heads=tuple(heads),
        queues=tuple(_depth(client, model, heads) for model in models),
        bookkeeper=bool(client.exists(keys.BOOKKEEPER)),
        unrecorded=int(client.xlen(keys.RESULTS)),
        memory_used=int(memory.get("used_memory", 0)),
        memory_max=int(memory.get("maxmemory", 0)),
        obstacles=tuple(
            standing_still(heads, {model: queues.num_waiting_by_version(client, model) for model in models})
        ),
    )


def _depth(client: redis.Redis, model: str, heads: list[HeadInfo]) -> QueueDepth:
    mine = [head for head in heads if head.model == model]
    running, slots = sum(head.running for head in mine), sum(head.slots for head in mine)
    return QueueDepth(model, queues.num_waiting(client, model), running, slots)
