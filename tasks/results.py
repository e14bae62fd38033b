"""The results stream: what heads tell about jobs, on its way into the database.

Heads append; the bookkeeper alone reads, through a consumer group: 200 records, one transaction, then the
records are acknowledged and deleted. A record is lost only with the queue server's disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from relay.plain import from_plain
from tasks import keys
from tasks.errors import RecordInvalid
from tasks.generation import GenerationTask, Outcome
from tasks.lease import ALLOW_OOM, DONE

#: seconds for which a finished attempt is remembered, so that a late second delivery is not generated again
DONE_MARKER_S = 3600
#: most records read, and recorded in one transaction, at a time
READ_COUNT = 200
#: bytes of records read at a time, about: those with log probabilities are megabytes each
READ_BYTES = 16 << 20
#: records of the first reading, which nothing is known about
_FIRST_COUNT = 25
#: unreadable records kept for a look
_REJECTED_KEPT = 1000

# What makes room must not need any: both run on a server that is full.
_MAKE_GROUP = (
    ALLOW_OOM
    + """
return redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
"""
)
_MOVE = (
    ALLOW_OOM
    + """
if #ARGV > 3 and tonumber(ARGV[3]) > 0 then
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[3], '*', unpack(ARGV, 4))
elseif #ARGV > 3 then
  redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[2])
"""
)


@dataclass(frozen=True, slots=True)
class Started:
    """A head gave the job a slot."""

    job: str
    attempt: int
    head: str
    #: Unix time, the head's clock
    at: float


@dataclass(frozen=True, slots=True)
class Record:
    """One readable entry of the stream."""

    entry: bytes
    content: Started | Outcome


_CONTENT: dict[bytes, Callable[[dict[str, Any]], Started | Outcome]] = {
    b"started": lambda value: from_plain(Started, value),
    b"outcome": Outcome.from_json,
}


def publish_started(client: redis.Redis, task: GenerationTask, head: str, at: float) -> None:
    """Tell that the job got its slot."""
    value = {"job": task.job, "attempt": task.attempt, "head": head, "at": at}
    client.xadd(keys.RESULTS, {"kind": "started", "task": task.task_id, "json": json.dumps(value)})


def publish_outcome(client: redis.Redis, outcome: Outcome) -> None:
    """Append the outcome and mark the attempt as done, both or neither. Acknowledge the task only after."""
    task_id = outcome.task_id
    pipeline = client.pipeline(transaction=True)
    pipeline.xadd(keys.RESULTS, {"kind": "outcome", "task": task_id, "json": json.dumps(outcome.to_json())})
    pipeline.set(keys.job(task_id), DONE, ex=DONE_MARKER_S)
    pipeline.delete(keys.tries(task_id))
    pipeline.execute()


def put_aside(client: redis.Redis, message: object) -> None:
    """Keep for a look what came as a job's message and names no job: JSON values, or text as it came."""
    text = message if isinstance(message, str) else json.dumps(message)
    client.xadd(keys.REJECTED, {"kind": "message", "json": text}, maxlen=_REJECTED_KEPT, approximate=False)


def is_done(client: redis.Redis, task_id: str) -> bool:
    """Whether the attempt's outcome was published within the last hour."""
    return client.get(keys.job(task_id)) == DONE.encode()


def decode(entry: bytes, fields: dict[bytes, bytes] | None) -> Record:
    """The record an entry holds. Raises RecordInvalid."""
    try:
        kind, value = (fields or {})[b"kind"], json.loads((fields or {})[b"json"])
        content = _CONTENT[kind](value)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordInvalid(f"entry {entry.decode()}: {type(error).__name__}: {error}") from error
    return Record(entry, content)


class ResultsReader:
    """The bookkeeper's end of the stream. One at a time (see `tasks.bookkeeper`)."""

    def __init__(self, client: redis.Redis, consumer: str = "bookkeeper") -> None:
        self._client = client
        self._consumer = consumer
        #: whether our own pending entries, read by us or a predecessor but not settled, may be left
        self._pending = True
        #: records that are `READ_BYTES` together, going by the ones read last
        self._within = _FIRST_COUNT

    def read(self, block_ms: int, count: int = READ_COUNT) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Up to `count` raw entries, those read before but never settled first; fewer where they are large.

        Waits up to `block_ms` for new ones; 0 does not wait.

        After a failure call `reread` so that the unsettled entries come again.
        """
        if self._pending:
            entries = self._read("0", count, None)
            if entries:
                return entries
            self._pending = False
        return self._read(">", count, block_ms or None)

    def reread(self) -> None:
        """Start over with the unsettled entries: what was read last may not have been recorded."""
        self._pending = True

    def settle(self, entries: list[bytes]) -> None:
        """The entries are recorded: acknowledge and delete them."""
        if not entries:
            return
        pipeline = self._client.pipeline(transaction=True)
        pipeline.xack(keys.RESULTS, keys.RESULTS_GROUP, *entries)
        pipeline.xdel(keys.RESULTS, *entries)
        pipeline.execute()

    def reject(self, entry: bytes, fields: dict[bytes, bytes] | None) -> None:
        """Move an unreadable entry aside, where it hurts no other record; of many the newest are kept."""
        self._move(entry, fields, keys.REJECTED, _REJECTED_KEPT)

    def put_aside(self, entry: bytes, fields: dict[bytes, bytes]) -> None:
        """Keep an outcome that this database has no job for; all of them, until somebody takes them."""
        self._move(entry, fields, keys.UNKNOWN, 0)

    def _move(self, entry: bytes, fields: dict[bytes, bytes] | None, stream: str, kept: int) -> None:
        """`kept`: entries that the other stream holds at most; 0: all."""
        flat = [part for item in (fields or {}).items() for part in item]
        names = (keys.RESULTS, stream)
        self._client.eval(_MOVE, len(names), *names, keys.RESULTS_GROUP, entry, kept, *flat)

    def _read(self, start: str, count: int, block_ms: int | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply = self._read_group(start, min(count, self._within), block_ms)
        entries: list[tuple[bytes, dict[bytes, bytes]]] = list(reply[0][1]) if reply else []
        if entries:
            largest = max(sum(map(len, (fields or {}).values())) for _, fields in entries)
            # never more than doubled: small ones may be followed by large ones
            self._within = max(1, min(2 * self._within, READ_COUNT, READ_BYTES // max(1, largest)))
        return entries

    def _read_group(self, start: str, count: int, block_ms: int | None) -> Any:
        """The group is made when reading finds none: a server that is full takes no needless command to make it."""
        while True:
            try:
                return self._client.xreadgroup(
                    keys.RESULTS_GROUP, self._consumer, {keys.RESULTS: start}, count=count, block=block_ms
                )
            except redis.ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
            self._client.eval(_MAKE_GROUP, 1, keys.RESULTS, keys.RESULTS_GROUP)
