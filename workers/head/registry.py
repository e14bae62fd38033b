"""The engine's memory of its jobs: which are live and who waits for them, and how recent ones ended."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

#: most finished outcomes kept for a second delivery
MAX_FINISHED = 10_000
#: most bytes of finished outcomes kept: room for the largest one that travels
MAX_FINISHED_BYTES = 64 << 20

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Joined:
    """What a delivery met."""

    #: the task id was unknown: this delivery, and no other, starts the job
    new: bool
    #: the job already has a slot
    started: bool
    #: the encoded outcome of a job that already ended
    finished: bytes | None


@dataclass(slots=True)
class _Live(Generic[W]):
    waiting: list[W] = field(default_factory=list)
    started: bool = False


class Registry(Generic[W]):
    """Live and finished tasks by id. Thread-safe; `W` is whoever waits for a task, compared by equality.

    Messages are delivered more than once (a blip of the broker's connection redelivers everything in flight),
    so a second delivery joins the first, or takes the outcome it missed. Finished outcomes are kept as bytes,
    the oldest forgotten first once there are too many or they are too large together.
    """

    def __init__(self, max_finished: int = MAX_FINISHED, max_finished_bytes: int = MAX_FINISHED_BYTES) -> None:
        self._max_finished = max_finished
        self._max_finished_bytes = max_finished_bytes
        self._lock = threading.Lock()
        self._live: dict[str, _Live[W]] = {}
        self._finished: OrderedDict[str, bytes] = OrderedDict()
        self._finished_bytes = 0

    def join(self, task_id: str, waiter: W) -> Joined:
        """Let `waiter` wait for this task; it does not wait if the answer holds the outcome."""
        with self._lock:
            finished = self._finished.get(task_id)
            if finished is not None:
                return Joined(new=False, started=True, finished=finished)
            live = self._live.get(task_id)
            new = live is None
            if live is None:
                live = self._live[task_id] = _Live()
            if waiter not in live.waiting:
                live.waiting.append(waiter)
            return Joined(new=new, started=live.started, finished=None)

    def leave(self, waiter: W) -> None:
        """Forget a waiter everywhere. Its tasks stay live: their messages will be delivered again."""
        with self._lock:
            for live in self._live.values():
                if waiter in live.waiting:
                    live.waiting.remove(waiter)

    def start(self, task_id: str) -> list[W]:
        """Note that a live task got its slot and return who waits for it."""
        with self._lock:
            live = self._live.get(task_id)
            if live is None:
                return []
            live.started = True
            return list(live.waiting)

    def waiting(self, task_id: str) -> list[W]:
        """Who waits for this task now."""
        with self._lock:
            live = self._live.get(task_id)
            return list(live.waiting) if live is not None else []

    def finish(self, task_id: str, outcome: bytes) -> list[W]:
        """Move a live task to the finished ones and return who waited; an unknown task is remembered too."""
        with self._lock:
            live = self._live.pop(task_id, None)
            self._remember(task_id, outcome)
            return live.waiting if live is not None else []

    def drop(self, task_id: str) -> list[W]:
        """Forget a live task, so that its next delivery starts it anew, and return who waited."""
        with self._lock:
            live = self._live.pop(task_id, None)
            return live.waiting if live is not None else []

    def live(self) -> tuple[str, ...]:
        """Ids of the tasks delivered and not yet ended, oldest first."""
        with self._lock:
            return tuple(self._live)

    def _remember(self, task_id: str, outcome: bytes) -> None:
        if task_id in self._finished:
            return
        self._finished[task_id] = outcome
        self._finished_bytes += len(outcome)
        while len(self._finished) > self._max_finished or self._finished_bytes > self._max_finished_bytes:
            _, forgotten = self._finished.popitem(last=False)
            self._finished_bytes -= len(forgotten)
