"""Keep a window of jobs queued: enough that no head waits, few enough for the server's memory.

Every priority has a window of its own, over what stands in the queue for it and for more urgent ones: an urgent job
is queued at once, whatever else waits there. Within a priority the queue is first come, first served, so a batch that
comes later gets its turn by taking back what its peers have in the queue beyond the next few jobs.

What no living head of its name can read has a window of its own: it waits in the queue for a head that can, and takes
no place from what can be done now. What is more than that waits in the database.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from storage.database import Database
from storage.job_records import ClaimedJob
from storage.jobs import claim_waiting, contenders, queued_or_running, unclaim
from storage.states import JobState
from storage.turns import Contender
from tasks import keys, queues
from tasks.connection import connect, translated
from tasks.errors import QueueUnreachable
from tasks.generation import known_versions
from tasks.heads import live_heads
from tasks.kept_database import refuse_other_database
from tasks.publish import Publisher, publications
from tasks.served import model_names, unheard_models
from tasks.settings import BookkeeperSettings

log = logging.getLogger(__name__)

#: jobs, and bytes of their requests, claimed in one transaction
_CLAIM_JOBS = 500
_CLAIM_BYTES = 4 * 1024 * 1024
#: a message takes about twice its request's bytes on the server
_BYTES_PER_REQUEST_BYTE = 2


@dataclass(frozen=True, slots=True)
class _Served:
    """What the living heads of a served name have."""

    slots: int = 0
    #: highest version of the tasks that one of them reads; None: no head lives, and any may come
    reads: int | None = None

    @property
    def versions(self) -> list[int]:
        """Of the tasks that can be done now."""
        return [version for version in known_versions() if self.reads is None or version <= self.reads]

    @property
    def later_versions(self) -> list[int]:
        """Of the tasks that wait for another head."""
        return [version for version in known_versions() if version not in self.versions]


_NOBODY = _Served()

#: served name → what its heads were when jobs were held back, and these jobs' batches
_Held = dict[str, tuple[_Served, frozenset[str]]]


def _of(held: _Held, model: str, served: _Served) -> frozenset[str]:
    """The batches that are held back, while the heads are these."""
    heads, batches = held.get(model, (served, frozenset()))
    return batches if heads == served else frozenset()


class Feeder:
    """Claims waiting jobs in the database and publishes them.

    One at a time feeds: the bookkeeper, or `submit` while there is none. Two at once do no harm: each job is claimed by
    one, and for a moment there is a window more.
    """

    def __init__(
        self, database: Database, client: redis.Redis, publisher: Publisher, settings: BookkeeperSettings
    ) -> None:
        self._database = database
        self._client = client
        self._publisher = publisher
        self._settings = settings
        self._paused = False
        #: what another host wrote
        self._held: _Held = {}
        #: what would be too much in the queue for another head
        self._surplus: _Held = {}
        self._unheard: frozenset[str] = frozenset()

    @property
    def paused(self) -> bool:
        """Whether nothing was fed at the last pass, because the queue server is short of memory."""
        return self._paused

    def feed(self) -> int:
        """Fill every served name's windows; the number of jobs published.

        Raises QueueUnreachable; the jobs that were to be published then wait again.
        """
        if self._memory_is_short():
            return 0
        served = self._served()
        names = model_names(self._client, self._database)
        return sum(self._feed_model(name, served.get(name, _NOBODY)) for name in names)

    def tell_who_waits(self) -> None:
        """Log the served names that jobs wait for and no head has had yet, when they change."""
        unheard = unheard_models(self._client, self._database)
        for name in sorted(unheard - self._unheard):
            log.warning("jobs wait for the first head that serves %r", name)
        self._unheard = unheard

    def turn(self) -> int:
        """`feed`, after `take_back`: what the one process does that may read the queue."""
        self.take_back()
        return self.feed()

    def take_back(self) -> int:
        """Make room for batches none of whose jobs is in flight while peers fill the window; the number taken back.

        What heads will take next stays in the queue; the rest waits again in the database, to be fed in turn.
        """
        served = self._served()
        names = model_names(self._client, self._database)
        return sum(self._take_back(name, served.get(name, _NOBODY)) for name in names)

    def _served(self) -> dict[str, _Served]:
        served: dict[str, _Served] = {}
        for head in live_heads(self._client):
            others = served.get(head.model, _NOBODY)
            served[head.model] = _Served(others.slots + head.slots, max(others.reads or 1, head.reads))
        return served

    def _feed_model(self, model: str, served: _Served) -> int:
        priorities = sorted({item.priority for item in self._contenders(model, served)})
        return sum(self._feed_priority(model, priority, served) for priority in priorities)

    def _contenders(self, model: str, served: _Served) -> list[Contender]:
        held = self._held_back(model, served)
        return [item for item in contenders(self._database, model) if item.batch_id not in held]

    def _window(self, served: _Served) -> int:
        return max(self._settings.window_min_jobs, self._settings.window_per_slot * served.slots)

    def _feed_priority(self, model: str, priority: int, served: _Served) -> int:
        fed = 0
        while not self._memory_is_short():
            room, room_bytes = self._room(model, priority, served)
            jobs = claim_waiting(
                self._database,
                model,
                priority=priority,
                max_jobs=min(room, _CLAIM_JOBS),
                max_bytes=min(room_bytes // _BYTES_PER_REQUEST_BYTE, _CLAIM_BYTES),
                without=self._held_back(model, served),
            )
            if not jobs:
                break
            fed += self._publish(model, jobs, served)
        return fed

    def _room(self, model: str, priority: int, served: _Served) -> tuple[int, int]:
        """Jobs, and bytes of messages, that a priority's window still takes."""
        versions = served.versions
        room_bytes = self._settings.window_bytes - queues.num_waiting_bytes(self._client, model, priority, versions)
        return self._window(served) - queues.num_waiting(self._client, model, priority, versions), room_bytes

    def _held_back(self, model: str, served: _Served) -> frozenset[str]:
        """The batches that wait for other heads, while the heads are these, or for another host.

        Those that have as much in the queue as may wait there for another head come again once there is room.
        """
        held, surplus = (_of(store, model, served) for store in (self._held, self._surplus))
        return held | surplus if surplus and self._room_for_later(model, served) <= 0 else held

    def _hold_back(self, store: _Held, model: str, jobs: Sequence[ClaimedJob], served: _Served) -> None:
        if jobs:
            store[model] = served, _of(store, model, served) | {job.batch_id for job in jobs}
            unclaim(self._database, jobs)

    def _room_for_later(self, model: str, served: _Served) -> int:
        return self._window(served) - queues.num_waiting(self._client, model, versions=served.later_versions)

    def _take_back(self, model: str, served: _Served) -> int:
        starving = {item.priority for item in self._contenders(model, served) if not item.num_in_flight}
        full = [priority for priority in sorted(starving) if min(self._room(model, priority, served)) <= 0]
        kept = self._settings.window_per_slot * served.slots
        newest = {task_id for priority in full for task_id in queues.newest_ids(self._client, model, priority, kept)}
        if not newest:
            return 0
        in_flight = {f"{job.id}.{job.attempt}": job for job in queued_or_running(self._database, model)}
        # A foreign message is nobody's to take out, and one of a job that has begun belongs to its head.
        ours = {task_id for task_id in newest & in_flight.keys() if in_flight[task_id].state is JobState.QUEUED}
        removed = queues.remove(self._client, model, ours)
        # Whoever dies here leaves jobs that the reconciler finds missing.
        return unclaim(self._database, [in_flight[task_id] for task_id in removed])

    def _publish(self, model: str, claimed: list[ClaimedJob], served: _Served) -> int:
        """Publish all but what waits for another host, or would be too much for another head; the number published."""
        found, held = publications(claimed)
        later = [job for job in claimed if job.id in found and found[job.id].version in served.later_versions]
        surplus: list[ClaimedJob] = []
        if later:
            surplus = later[max(self._room_for_later(model, served), 0) :]
        self._hold_back(self._held, model, held, served)
        self._hold_back(self._surplus, model, surplus, served)
        held_ids = {job.id for job in [*held, *surplus]}
        jobs = [job for job in claimed if job.id not in held_ids]
        try:
            self._publisher.publish(found[job.id] for job in jobs)
            for job in jobs:
                log.debug("job queued", extra={"job": job.id, "attempt": job.attempt})
        except QueueUnreachable:
            # Should some have been queued after all, their second message will find them live or done.
            unclaim(self._database, jobs)
            raise
        return len(jobs)

    def _memory_is_short(self) -> bool:
        share = queues.memory_share(self._client)
        short = share is not None and share >= self._settings.memory_share
        if short and not self._paused:
            log.warning("feeding paused: the queue server uses %.0f%% of its maxmemory", 100 * (share or 0))
        if self._paused and not short:
            log.info("feeding goes on: the queue server has memory again")
        self._paused = short
        return short


def feed_once(database: Database, settings: BookkeeperSettings) -> int:
    """One pass of the feeder, for a process that is no bookkeeper; the number of jobs published.

    A bookkeeper at work feeds by itself, within a second: then none. Raises OtherDatabase, QueueUnreachable,
    QueueRefused or a StorageError.
    """
    client = connect(settings)
    try:
        with translated(), Publisher(settings) as publisher:
            refuse_other_database(client, database)
            if client.exists(keys.BOOKKEEPER):
                return 0
            return Feeder(database, client, publisher, settings).feed()
    finally:
        client.close()
