"""Looks at the system twice a second: what does not work, and which jobs nobody has."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import select

from relay import keys as wire_keys
from storage.database import Database
from storage.errors import StorageError
from storage.states import OPEN_STATES, BatchStatus
from storage.tables import batch, job
from tasks import keys, queues
from tasks.heads import PRESENCE_MS, HeadInfo
from tests.chaos.field import BOOKKEEPER, NUM_FRONTS, Field

#: seconds between two looks
LOOK_S = 0.5
#: a presence that was not renewed for this long says nothing any more
STALE_S = 5.0
#: life of a tail's presence and of the bookkeeper's tenure, in seconds
_TAIL_TTL_S = 10.0


@dataclass(frozen=True, slots=True)
class HeadSeen:
    """A head's presence."""

    info: HeadInfo
    #: seconds since it was renewed
    age_s: float


@dataclass(frozen=True, slots=True)
class TailSeen:
    """A tail's presence."""

    name: str
    #: Unix time of its loop's last turn
    pulse: float
    #: seconds since it was renewed
    age_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """What stands on the two servers."""

    heads: tuple[HeadSeen, ...] = ()
    tails: tuple[TailSeen, ...] = ()
    #: process id of the bookkeeper at work
    bookkeeper: int | None = None
    #: task ids in the ready lists and on the results stream
    queued: frozenset[str] = frozenset()
    #: servers that do not answer
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alive:
    """What the supervisor knows of one process."""

    pid: int
    started_at: float
    num_fronts: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look, judged."""

    #: Unix time
    at: float
    #: what does not work, one text each; empty: everything does
    unwell: tuple[str, ...]
    #: every open job's deliveries by task id
    open_jobs: Mapping[str, int]
    #: those that stand in no ready list, in no living engine and on no stream
    stranded: frozenset[str]
    #: heads and tails that are down, or have not worked yet since their latest start
    booting: frozenset[str] = frozenset()

    @property
    def bad(self) -> tuple[str, ...]:
        """What does not work, apart from what still starts."""
        return tuple(text for text in self.unwell if subject(text) not in self.booting)


def subject(text: str) -> str:
    """What a text of `unwell` is about: a process or a server."""
    return text.removeprefix("the ").split()[0]


def unwell(look: Look, expected: Mapping[str, Alive | None]) -> tuple[str, ...]:
    """What does not work; `expected` are the processes that should be up, None for one that is not."""
    found = [f"the {name} server is away" for name in look.silent]
    heads = {seen.info.head_id: seen for seen in look.heads}
    for name, alive in expected.items():
        if alive is None:
            found.append(f"{name} is down")
        elif name == BOOKKEEPER:
            if look.bookkeeper != alive.pid:
                found.append(f"{name} is not at work")
        elif name.startswith("head"):
            found += _unwell_head(name, heads.get(name), alive)
        elif not any(_is_of(seen, name, alive) for seen in look.tails):
            found.append(f"{name} is not there")
    return tuple(found)


def _unwell_head(name: str, seen: HeadSeen | None, alive: Alive) -> list[str]:
    if seen is None or not is_fresh(seen, alive):
        return [f"{name} is not there"]
    if not seen.info.consuming:
        return [f"{name} takes no jobs"]
    if alive.num_fronts < NUM_FRONTS:
        return [f"{name} has {alive.num_fronts} fronts"]
    return []


def is_fresh(seen: HeadSeen, alive: Alive | None) -> bool:
    """Whether a presence was renewed of late, by the process that lives now."""
    return alive is not None and seen.age_s < STALE_S and seen.info.started_at >= alive.started_at


def _is_of(seen: TailSeen, name: str, alive: Alive) -> bool:
    return seen.name == name and seen.pulse >= alive.started_at and seen.age_s < STALE_S


def stranded(look: Look, expected: Mapping[str, Alive | None], jobs: Iterable[str]) -> frozenset[str]:
    """The open jobs that nobody has; `jobs` by task id."""
    held = set(look.queued)
    for seen in look.heads:
        if is_fresh(seen, expected.get(seen.info.head_id)):
            held.update(seen.info.live)
    return frozenset(jobs) - held


@dataclass
class Watch:
    """A context manager: looks from a thread of its own; `samples` grows."""

    system: Field
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"socket_timeout": 2.0, "retry": Retry(NoBackoff(), 0), "protocol": 2}
        self._queue = redis.Redis.from_url(self.system.queue.url, **options)
        self._wire = redis.Redis.from_url(self.system.wire.url, **options)
        #: start of each process since which it has been seen at work
        self._worked: dict[str, float] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._queue.close()
        self._wire.close()

    def _run(self) -> None:
        with closing(Database.open(self.system.environment["SHARDQ_DATABASE_URL"])) as database:
            while not self._ending.wait(LOOK_S):
                self.samples.append(self._sample(database))

    def _sample(self, database: Database) -> Sample:
        expected = {name: self._alive(name) for name in self.system.expected}
        # The database first: a job that ends between the two looks is then still seen where it was.
        jobs = open_jobs(database)
        look = self._look()
        texts = unwell(look, expected)
        return Sample(time.time(), texts, jobs, stranded(look, expected, jobs), self._booting(expected, texts))

    def _booting(self, expected: Mapping[str, Alive | None], texts: tuple[str, ...]) -> frozenset[str]:
        ill = {subject(text) for text in texts}
        for name, alive in expected.items():
            if alive is not None and name not in ill:
                self._worked[name] = alive.started_at
        return frozenset(
            name
            for name, alive in expected.items()
            if name != BOOKKEEPER and (alive is None or self._worked.get(name) != alive.started_at)
        )

    def _alive(self, name: str) -> Alive | None:
        pid = self.system.living(name)
        if pid is None:
            return None
        num_fronts = len(self.system.fronts(name)) if name.startswith("head") else 0
        return Alive(pid, self.system.started_at[name], num_fronts)

    def _look(self) -> Look:
        silent = []
        try:
            heads, bookkeeper, queued = look_at_queue(self._queue, self.system.name)
        except redis.RedisError:
            heads, bookkeeper, queued = (), None, frozenset()
            silent.append("queue")
        try:
            tails = look_at_wire(self._wire)
        except redis.RedisError:
            tails = ()
            silent.append("wire")
        return Look(heads, tails, bookkeeper, queued, tuple(silent))


def open_jobs(database: Database) -> dict[str, int]:
    """Deliveries by task id of every job of a published batch that has not ended.

    Empty while the database cannot be read.
    """
    columns = [job.c.id, job.c.attempt, job.c.deliveries]
    query = (
        select(*columns)
        .join(batch, batch.c.id == job.c.batch_id)
        .where(job.c.state.in_(OPEN_STATES), batch.c.status != BatchStatus.VALIDATING)
    )
    try:
        with database.read() as connection:
            return {f"{row.id}.{row.attempt}": row.deliveries for row in connection.execute(query)}
    except StorageError:
        return {}


def look_at_queue(client: redis.Redis, model: str) -> tuple[tuple[HeadSeen, ...], int | None, frozenset[str]]:
    """Heads, the bookkeeper's process id, and the task ids in ready lists and on the results stream."""
    names = [keys.head(_text(name)) for name in client.smembers(keys.HEADS)]
    pipeline = client.pipeline(transaction=False)
    for name in [*names, keys.BOOKKEEPER]:
        pipeline.get(name)
        pipeline.pttl(name)
    replies: list[Any] = pipeline.execute()
    pairs = list(zip(replies[::2], replies[1::2], strict=True))
    heads = tuple(HeadSeen(HeadInfo.from_json(value), (PRESENCE_MS - ttl) / 1000) for value, ttl in pairs[:-1] if value)
    holder = pairs[-1][0]
    bookkeeper = int(_text(holder).split(":")[1]) if holder else None
    entries: Any = client.xrange(keys.RESULTS)
    recorded = {_text(fields.get(b"task", b"")) for _, fields in entries}
    return heads, bookkeeper, frozenset(queues.waiting_ids(client, model)) | recorded


def look_at_wire(client: redis.Redis) -> tuple[TailSeen, ...]:
    """Tails by their presence."""
    names = [_text(key) for key in client.scan_iter(match=wire_keys.TAILS_PATTERN, count=1000)]
    pipeline = client.pipeline(transaction=False)
    presences = [name for name in names if wire_keys.is_presence(name)]
    for name in presences:
        pipeline.get(name)
        pipeline.pttl(name)
    replies: list[Any] = pipeline.execute()
    found = []
    for name, value, ttl in zip(presences, replies[::2], replies[1::2], strict=True):
        if value:
            tail = wire_keys.tail_name(name.removeprefix(wire_keys.presence("")))
            found.append(TailSeen(tail, float(json.loads(value)["pulse"]), _TAIL_TTL_S - ttl / 1000))
    return tuple(found)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
