"""Carry out what the database has decided to stop: cancelled jobs and those past their deadline.

Jobs in flight are flagged for the engines (`tasks.stops`), their messages are taken out of the queue, and those that
nobody holds end here; the others end with the outcome of whoever holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import redis

from storage.database import Database
from storage.job_records import PendingStop
from storage.stops import expire_due, pending_stops, settle_stops
from tasks import keys, queues, stops
from tasks.connection import connect, translated
from tasks.heads import known_heads, live_heads
from tasks.settings import TaskSettings

#: seconds a job is flagged before it may end without a word from a head: its message may be between two places
SETTLE_S = 3.0
#: seconds for which the flag of an ended job is kept: a late delivery must still find it
KEEP_FLAG_S = 600.0


class Stopper:
    """Remembers, from turn to turn, since when it knows each stop. `clock` gives seconds of a steady clock."""

    def __init__(self, database: Database, client: redis.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._client = client
        self._clock = clock
        #: task id → time at which it was flagged first, and at which it was first seen to have ended
        self._flagged_at: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}

    def turn(self) -> int:
        """Do what there is to do now; the number of jobs that ended here.

        Raises a StorageError or the client's error; the next turn then does it again.
        """
        expire_due(self._database)
        pending = {stop.task_id: stop for stop in pending_stops(self._database)}
        now = self._clock()
        self._flagged_at = {task_id: self._flagged_at.get(task_id, now) for task_id in pending}
        stops.flag(self._client, {task_id: stop.reason for task_id, stop in pending.items()})
        ended = self._end_unheld(pending, now)
        self._drop_flags(pending.keys(), now)
        return ended

    def _end_unheld(self, pending: dict[str, PendingStop], now: float) -> int:
        """In the order in which a job moves: one that moves on meanwhile is still seen at its next place."""
        unheld = self._unleased(pending)
        if not unheld:
            return 0
        removed: set[str] = set()
        for model in {stop.model for stop in unheld.values()}:
            removed |= queues.remove(self._client, model, unheld.keys())
        for task_id in self._taken_ids():
            unheld.pop(task_id, None)
        unheld = self._unleased(unheld)
        due = [
            stop
            for task_id, stop in unheld.items()
            if task_id in removed or now - self._flagged_at[task_id] >= SETTLE_S
        ]
        return settle_stops(self._database, due) if due else 0

    def _unleased(self, pending: dict[str, PendingStop]) -> dict[str, PendingStop]:
        """Those that no head has, and whose outcome is not on its way."""
        if not pending:
            return {}
        values = self._client.mget([keys.job(task_id) for task_id in pending])
        return {task_id: stop for (task_id, stop), value in zip(pending.items(), values, strict=True) if value is None}

    def _taken_ids(self) -> Iterable[str]:
        for head_id in [None, *sorted(known_heads(self._client))]:
            yield from queues.unacked_ids(self._client, head_id)
        for head in live_heads(self._client):
            yield from head.live

    def _drop_flags(self, pending: Iterable[str], now: float) -> None:
        ended = stops.all_flagged(self._client).difference(pending)
        self._ended_at = {task_id: self._ended_at.get(task_id, now) for task_id in ended}
        stops.unflag(self._client, [t for t, at in self._ended_at.items() if now - at >= KEEP_FLAG_S])


def stop_once(database: Database, settings: TaskSettings) -> int:
    """One turn, for a process that is no bookkeeper; the number of jobs that ended by it.

    Raises QueueUnreachable, QueueRefused or a StorageError.
    """
    client = connect(settings)
    try:
        with translated():
            return Stopper(database, client).turn()
    finally:
        client.close()
