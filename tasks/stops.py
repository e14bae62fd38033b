"""Which attempts shall end before their text does, as the engines see it.

The database decides (`storage.stops`); this persisted hash on the queue server mirrors it for the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import redis

from tasks import keys
from tasks.generation import StopReason
from tasks.lease import ALLOW_OOM

# Stopping jobs makes room: a server that is full must not refuse it.
_FLAG = (
    ALLOW_OOM
    + """
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 0
"""
)
#: task ids flagged by one call
_CHUNK = 500


def flag(client: redis.Redis, stops: Mapping[str, StopReason]) -> None:
    """Ask whoever works on these task ids to stop. Repeating it changes nothing."""
    remaining = iter(stops.items())
    while chunk := list(islice(remaining, _CHUNK)):
        client.eval(_FLAG, 1, keys.STOPS, *(text for task_id, reason in chunk for text in (task_id, reason.value)))


def flagged(client: redis.Redis, task_ids: Sequence[str]) -> dict[str, StopReason]:
    """Those of the task ids that shall stop, with the reason. One round trip; none without ids."""
    if not task_ids:
        return {}
    values: Any = client.hmget(keys.STOPS, list(task_ids))
    return {
        task_id: StopReason(value.decode() if isinstance(value, bytes) else value)
        for task_id, value in zip(task_ids, values, strict=True)
        if value is not None
    }


def all_flagged(client: redis.Redis) -> set[str]:
    """Every task id with a flag."""
    names: Any = client.hkeys(keys.STOPS)
    return {name.decode() if isinstance(name, bytes) else name for name in names}


def unflag(client: redis.Redis, task_ids: Sequence[str]) -> int:
    """Forget the flags of these task ids; the number there were."""
    return int(client.hdel(keys.STOPS, *task_ids)) if task_ids else 0
