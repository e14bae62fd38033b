"""What the queue server shows of the system, and why a batch does not move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.records import Counts
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import HeadInfo, live_heads, registered_models
from tasks.queues import memory_share, num_waiting
from tasks.settings import TaskSettings

#: share of the queue server's memory from which it is worth a word
FULL_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class System:
    """What lives now. All empty with a `problem`: the queue server could not be asked."""

    problem: str | None = None
    heads: tuple[HeadInfo, ...] = ()
    bookkeeper: bool = False
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
            "heads": heads,
            "queued": self.queued,
            "memory_share": self.memory_share,
        }


def look_around() -> System:
    """Ask the queue server. Never raises for an unreachable one: that is one of the answers."""
    try:
        client = connect(TaskSettings())
        with translated():
            models = registered_models(client)
            return System(
                heads=tuple(live_heads(client)),
                bookkeeper=bool(client.exists(keys.BOOKKEEPER)),
                queued={model: num_waiting(client, model) for model in models},
                memory_share=memory_share(client),
            )
    except TaskError as error:
        return System(problem=str(error))


def why_nothing_moves(system: System, counts: Counts, *, stopping: bool = False) -> Iterator[str]:
    """What stands in the way of a batch with these open jobs, one line each; nothing if all is well.

    `stopping`: it is being cancelled, which needs no head.
    """
    if system.problem:
        yield system.problem
        return
    if not system.bookkeeper:
        yield "no bookkeeper runs: nothing is fed or recorded (start `shardq bookkeeper`)"
    if stopping:
        return
    if not system.heads:
        yield "no head is alive: jobs wait in the queue (start `shardq head`)"
    elif not any(head.consuming for head in system.heads):
        yield "no head has a tail: jobs wait in the queue (start `shardq tail`)"
    if system.memory_share is not None and system.memory_share >= FULL_SHARE and counts.waiting:
        yield f"the queue server's memory is {system.memory_share:.0%} full: feeding waits until it is less"
