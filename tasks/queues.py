"""What stands on the queue server: lengths, sizes and the task ids of waiting and of taken messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import redis

from tasks import keys
from tasks.generation import known_versions

#: messages read from a ready list at a time
_SCAN_COUNT = 500


def num_waiting(
    client: redis.Redis,
    model: str,
    priority: int = keys.PRIORITIES[-1],
    versions: Iterable[int] | None = None,
) -> int:
    """Messages of a served name that no head has taken yet, of `priority` and of more urgent ones.

    With tasks of any version, or of these.
    """
    pipeline = client.pipeline(transaction=False)
    for name in keys.ready(model, priority, versions):
        pipeline.llen(name)
    return sum(pipeline.execute())


def num_waiting_by_version(client: redis.Redis, model: str) -> dict[int, int]:
    """Messages of a served name that no head has taken yet, by the version of their tasks; those that have any."""
    numbers = {version: num_waiting(client, model, versions=[version]) for version in known_versions()}
    return {version: number for version, number in numbers.items() if number}


def num_waiting_bytes(
    client: redis.Redis,
    model: str,
    priority: int = keys.PRIORITIES[-1],
    versions: Iterable[int] | None = None,
) -> int:
    """Memory of the server that those messages take."""
    pipeline = client.pipeline(transaction=False)
    for name in keys.ready(model, priority, versions):
        pipeline.memory_usage(name, samples=0)
    return sum(size or 0 for size in pipeline.execute())


def newest_ids(client: redis.Redis, model: str, priority: int, kept: int) -> list[str]:
    """The task ids of the messages of one priority that will be taken last: all but the first `kept` of them."""
    ids: list[str] = []
    for version in known_versions():
        name = keys.ready_at(keys.queue(model, version), priority)
        number = client.llen(name) - kept
        ids += [_id_in(message) for message in client.lrange(name, 0, number - 1)] if number > 0 else []
    return ids


def memory_share(client: redis.Redis) -> float | None:
    """The server's used memory over its `maxmemory`; None without such a limit."""
    memory: dict[str, Any] = client.info("memory")
    limit = int(memory.get("maxmemory", 0))
    return int(memory["used_memory"]) / limit if limit else None


def waiting_ids(client: redis.Redis, model: str) -> Iterator[str]:
    """The task ids in a served name's ready lists, one at a time in bounded memory.

    Messages come in at a list's left end and leave at its right end, so a list that moves meanwhile repeats
    some ids but hides none that stays.
    """
    for name in keys.ready(model):
        start = 0
        while messages := client.lrange(name, start, start + _SCAN_COUNT - 1):
            start += len(messages)
            yield from map(_id_in, messages)


def remove(client: redis.Redis, model: str, task_ids: Collection[str]) -> set[str]:
    """Take every message of these task ids out of a served name's ready lists; the ids that had one there."""
    removed = set()
    for name in keys.ready(model):
        start = 0
        while messages := client.lrange(name, start, start + _SCAN_COUNT - 1):
            start += len(messages)
            for message in messages:
                found = _id_in(message)
                if found in task_ids and client.lrem(name, 1, message):  # type: ignore[arg-type]
                    removed.add(found)
                    start -= 1
    return removed


def num_unacked(client: redis.Redis, head_id: str | None) -> int:
    """Messages that a head's fronts took and did not acknowledge yet."""
    return int(client.hlen(keys.unacked(head_id)))


def unacked_ids(client: redis.Redis, head_id: str | None) -> Iterator[str]:
    """The task ids of the messages that a head's fronts took and did not acknowledge yet."""
    for _, value in client.hscan_iter(keys.unacked(head_id), count=100):
        yield _id_in(value)


def _id_in(stored: bytes | str) -> str:
    """The task id of a waiting message, or of one taken, which stands in a list; empty if it cannot be read.

    A foreign message must not hide the others from whoever looks at all of them.
    """
    try:
        message = json.loads(stored)
        return task_id(message[0] if isinstance(message, list) else message)
    except (AttributeError, LookupError, ValueError, RecursionError):
        return ""


def task_id(message: dict[str, Any]) -> str:
    """The task id of a message as kombu stores it; empty for one that is no Celery task."""
    return str(message.get("headers", {}).get("id", ""))
