"""What the queue server shows of the system, and why a batch does not move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from cli.next_steps import with_next_step
from cli.output import counted
from relay.errors import RelayError
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import TailInfo
from storage.batch_records import Counts
from storage.database import Database
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import HeadInfo, live_heads, registered_models, wrong_database
from tasks.kept_database import difference
from tasks.queues import memory_share, num_waiting_by_version
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
    #: the same, by served name and version of the tasks
    versions: dict[str, dict[int, int]] = field(default_factory=dict)
    #: tails that live; looked for only if a head has none and does not say why
    tails: tuple[TailInfo, ...] = ()
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
            heads = tuple(live_heads(client))
            versions = {model: num_waiting_by_version(client, model) for model in registered_models(client)}
            if not heads and not versions and (wrong := wrong_database(client)):
                return System(problem=wrong)
            return System(
                heads=heads,
                bookkeeper=bool(client.exists(keys.BOOKKEEPER)),
                other_database=None if database is None else _other_database(client, database),
                queued={model: sum(numbers.values()) for model, numbers in versions.items()},
                versions=versions,
                tails=_living_tails() if any(map(_is_silent, heads)) else (),
                memory_share=memory_share(client),
            )
    except TaskError as error:
        return System(problem=with_next_step(str(error), type(error)))


def _other_database(client: redis.Redis, database: Database) -> str | None:
    with suppress(NoPermissionError):  # an account of an earlier version may not ask
        return difference(client, database)
    return None


def _is_silent(head: HeadInfo) -> bool:
    """It has no tail, and is of a version that does not say why."""
    return not head.consuming and not head.whole and head.obstacle is None


def _living_tails() -> tuple[TailInfo, ...]:
    try:
        with closing(RedisRelay(RelaySettings().url, allow_insecure=TaskSettings().allow_insecure)) as relay:
            return tuple(relay.tails())
    except RelayError:  # who may not look there, or looks at another server, sees none
        return ()


def idle_heads(heads: Iterable[HeadInfo], tails: Iterable[TailInfo] = ()) -> Iterator[str]:
    """Why heads take no jobs, as far as they say, or as `tails` show: one line each, with the next step."""
    for head in heads:
        if not head.consuming and head.obstacle is not None:
            yield f"head {head.head_id} takes no jobs: {head.obstacle}"
        apart = [tail for tail in tails if tail.frames != head.frames] if _is_silent(head) else []
        for tail in apart:
            older = "head" if head.frames < tail.frames else "tail"
            yield (
                f"head {head.head_id} takes no jobs: tail {tail.tail} speaks frames of version {tail.frames}, "
                f"the head of version {head.frames} (upgrade the {older})"
            )


def unread_tasks(heads: Iterable[HeadInfo], model: str, waiting: Mapping[int, int]) -> Iterator[str]:
    """The tasks of a served name, `waiting` by version, that none of its living heads can read."""
    serving = sorted((head for head in heads if head.model == model), key=attrgetter("head_id"))
    for version, number in sorted(waiting.items()):
        if serving and max(head.reads for head in serving) < version:
            each = ", ".join(f"head {head.head_id} reads up to {head.reads}" for head in serving)
            without_right = [head.head_id for head in serving if head.knows >= version]
            mend = "upgrade a head"
            if without_right:
                mend = f"{without_right[0]} may not take them: `shardq server update` on the host, then start it again"
            yield (
                f"waiting for a head that reads version {version} of the tasks: {counted(number, 'job')} of {model}; "
                f"{each} ({mend})"
            )


def standing_still(
    heads: Sequence[HeadInfo], versions: Mapping[str, Mapping[int, int]], tails: Iterable[TailInfo] = ()
) -> Iterator[str]:
    """What stands still whatever batch one asks about: idle heads, and tasks that no head can read.

    `versions`: messages waiting, by served name and version of the tasks.
    """
    yield from idle_heads(heads, tails)
    for model, waiting in versions.items():
        yield from unread_tasks(heads, model, waiting)


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
    # a head that starts is known before its name is registered
    had = sorted({*models} & {*system.queued, *(head.model for head in system.heads)})
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
        yield from _slots(system, system.heads, counts)


def _heads_of(system: System, model: str, counts: Counts) -> Iterator[str]:
    """What keeps the heads from jobs of this served name."""
    heads = [head for head in system.heads if head.model == model]
    if heads:
        yield from unread_tasks(heads, model, system.versions.get(model, {}))
        yield from _slots(system, heads, counts)
        return
    served = ", ".join(sorted({head.model for head in system.heads}))
    yield f"no head serves {model!r}, only {served} (start `shardq head --name {model}`)"


def _slots(system: System, heads: Sequence[HeadInfo], counts: Counts) -> Iterator[str]:
    ready = [head for head in heads if head.consuming]
    if not ready:
        said = list(idle_heads(heads, system.tails))
        yield from said
        names = ", ".join(head.head_id for head in heads)
        if not said:
            yield f"no head has a tail ({names}): jobs wait in the queue (start `shardq tail`)"
    elif not counts.running and all(head.running >= head.slots for head in ready):
        num_slots = sum(head.slots for head in ready)
        yield f"all {num_slots} slots are busy: jobs wait for their turn (another `shardq head` begins them sooner)"
