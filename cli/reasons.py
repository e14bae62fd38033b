"""What the queue server shows of the system, and why a batch does not move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from cli.next_steps import with_next_step
from storage.batch_records import Counts
from storage.database import Database
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import HeadInfo, live_heads, registered_models
from tasks.kept_database import difference
from tasks.queues import memory_share, num_waiting
from tasks.settings import TaskSettings

#: share of the queue server's memory from which it is worth a word
FULL_SHARE = 0.7
#: share of it from which the server refuses what is queued
OUT_SHARE = 0.98


@dataclass(frozen=True, slots=True)
class System:
    """What lives now. All empty with a `problem`: the queue server could not be asked."""

    problem: str | None = None
    heads: tuple[HeadInfo, ...] = ()
    bookkeeper: bool = False
    #: why results of the database that was asked about will not reach it
    other_database: str | None = None
    #: messages waiting, by served name
    queued: dict[str, int] = field(default_factory=dict)
    #: of `maxmemory`; None without a limit
    memory_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        heads = [{**asdict(head), "live": len(head.live)} for head in self.heads]
        return {
            "problem": self.problem,
            "bookkeeper": self.bookkeeper,
            "other_database": self.other_database,
            "heads": heads,
            "queued": self.queued,
            "memory_share": self.memory_share,
        }


def look_around(settings: TaskSettings | None = None, database: Database | None = None) -> System:
    """Ask the queue server, that of this process' variables without `settings`; also whether `database` is kept there.

    Never raises for an unreachable one: that is one of the answers.
    """
    try:
        client = connect(settings or TaskSettings())
        with translated():
            models = registered_models(client)
            return System(
                heads=tuple(live_heads(client)),
                bookkeeper=bool(client.exists(keys.BOOKKEEPER)),
                other_database=None if database is None else _other_database(client, database),
                queued={model: num_waiting(client, model) for model in models},
                memory_share=memory_share(client),
            )
    except TaskError as error:
        return System(problem=with_next_step(str(error), type(error)))


def _other_database(client: redis.Redis, database: Database) -> str | None:
    with suppress(NoPermissionError):  # an account of an earlier version may not ask
        return difference(client, database)
    return None


def why_nothing_moves(
    system: System, counts: Counts, *, stopping: bool = False, models: Collection[str] = ()
) -> Iterator[str]:
    """What stands in the way of these open jobs, one line each with the next step; nothing if all is well.

    `stopping`: they are being cancelled, which needs no head. `models`: the served names that they wait for; none
    given: any head will do.
    """
    if system.problem:
        yield system.problem
        return
    if system.other_database:
        yield (
            f"results of this database will not come: {system.other_database} (set SHARDQ_DATABASE_URL to the one that "
            "is kept; outcomes that got lost on the way are in `shardq rejected`)"
        )
    if not system.bookkeeper:
        yield "no bookkeeper runs: nothing is fed or recorded (start `shardq bookkeeper`)"
    if stopping:
        return
    if counts.waiting:
        yield from _memory(system.memory_share)
    yield from _heads(system, models, counts)


def _memory(share: float | None) -> Iterator[str]:
    if share is None or share < FULL_SHARE:
        return
    if share >= OUT_SHARE:
        yield (
            f"the queue server's memory is {share:.0%} full: nothing more can be queued (raise `maxmemory` in its "
            "configuration, or wait until jobs end)"
        )
    else:
        yield (
            f"the queue server's memory is {share:.0%} full: feeding pauses until it is less (wait until jobs end, "
            "or raise its `maxmemory`)"
        )


def _heads(system: System, models: Collection[str], counts: Counts) -> Iterator[str]:
    """Which heads these jobs lack."""
    had = sorted(model for model in models if model in system.queued)
    for model in sorted({*models}.difference(had)):
        yield f"jobs wait for the first head that serves {model!r} (start `shardq head --name {model}`)"
    if models and not had:
        return
    if not system.heads:
        yield "no head is alive: jobs wait in the queue (start `shardq head`)"
    elif had:
        for model in had:
            yield from _heads_of(system, model, counts)
    else:
        yield from _slots(system.heads, counts)


def _heads_of(system: System, model: str, counts: Counts) -> Iterator[str]:
    """What keeps the heads from jobs of this served name."""
    heads = [head for head in system.heads if head.model == model]
    if heads:
        yield from _slots(heads, counts)
        return
    served = ", ".join(sorted({head.model for head in system.heads}))
    yield f"no head serves {model!r}, only {served} (start `shardq head --name {model}`)"


def _slots(heads: Sequence[HeadInfo], counts: Counts) -> Iterator[str]:
    ready = [head for head in heads if head.consuming]
    if not ready:
        names = ", ".join(head.head_id for head in heads)
        yield f"no head has a tail ({names}): jobs wait in the queue (start `shardq tail`)"
    elif not counts.running and all(head.running >= head.slots for head in ready):
        num_slots = sum(head.slots for head in ready)
        yield f"all {num_slots} slots are busy: jobs wait for their turn (another `shardq head` begins them sooner)"
