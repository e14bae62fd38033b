"""Keep a window of jobs queued: enough that no head waits, few enough for the server's memory.

Every priority has a window of its own, over what stands in the queue for it and for more urgent ones: an urgent job
is queued at once, whatever else waits there. Within a priority the queue is first come, first served, so a batch that
comes later gets its turn by taking back what its peers have in the queue beyond the next few jobs.
"""

from __future__ import annotations

import logging
from collections import Counter

import redis

from storage.database import Database
from storage.job_records import ClaimedJob
from storage.jobs import claim_waiting, contenders, queued_or_running, unclaim
from storage.states import JobState
from tasks import keys, queues
from tasks.connection import connect, translated
from tasks.errors import QueueUnreachable
from tasks.heads import live_heads
from tasks.kept_database import refuse_other_database
from tasks.publish import Publication, Publisher
from tasks.served import model_names
from tasks.settings import BookkeeperSettings

log = logging.getLogger(__name__)

#: jobs, and bytes of their requests, claimed in one transaction
_CLAIM_JOBS = 500
_CLAIM_BYTES = 4 * 1024 * 1024
#: a message takes about twice its request's bytes on the server
_BYTES_PER_REQUEST_BYTE = 2


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
        slots = self._slots()
        return sum(self._feed_model(name, slots[name]) for name in model_names(self._client, self._database))

    def turn(self) -> int:
        """`feed`, after `take_back`: what the one process does that may read the queue."""
        self.take_back()
        return self.feed()

    def take_back(self) -> int:
        """Make room for batches none of whose jobs is in flight while peers fill the window; the number taken back.

        What heads will take next stays in the queue; the rest waits again in the database, to be fed in turn.
        """
        slots = self._slots()
        return sum(self._take_back(name, slots[name]) for name in model_names(self._client, self._database))

    def _slots(self) -> Counter[str]:
        slots: Counter[str] = Counter()
        for head in live_heads(self._client):
            slots[head.model] += head.slots
        return slots

    def _feed_model(self, model: str, slots: int) -> int:
        priorities = sorted({item.priority for item in contenders(self._database, model)})
        return sum(self._feed_priority(model, priority, self._window(slots)) for priority in priorities)

    def _window(self, slots: int) -> int:
        return max(self._settings.window_min_jobs, self._settings.window_per_slot * slots)

    def _feed_priority(self, model: str, priority: int, window: int) -> int:
        fed = 0
        while not self._memory_is_short():
            room, room_bytes = self._room(model, priority, window)
            jobs = claim_waiting(
                self._database,
                model,
                priority=priority,
                max_jobs=min(room, _CLAIM_JOBS),
                max_bytes=min(room_bytes // _BYTES_PER_REQUEST_BYTE, _CLAIM_BYTES),
            )
            if not jobs:
                break
            self._publish(jobs)
            fed += len(jobs)
        return fed

    def _room(self, model: str, priority: int, window: int) -> tuple[int, int]:
        """Jobs, and bytes of messages, that a priority's window still takes."""
        room_bytes = self._settings.window_bytes - queues.num_waiting_bytes(self._client, model, priority)
        return window - queues.num_waiting(self._client, model, priority), room_bytes

    def _take_back(self, model: str, slots: int) -> int:
        starving = {item.priority for item in contenders(self._database, model) if not item.num_in_flight}
        full = [priority for priority in sorted(starving) if min(self._room(model, priority, self._window(slots))) <= 0]
        kept = self._settings.window_per_slot * slots
        newest = {task_id for priority in full for task_id in queues.newest_ids(self._client, model, priority, kept)}
        if not newest:
            return 0
        in_flight = {f"{job.id}.{job.attempt}": job for job in queued_or_running(self._database, model)}
        # A foreign message is nobody's to take out, and one of a job that has begun belongs to its head.
        ours = {task_id for task_id in newest & in_flight.keys() if in_flight[task_id].state is JobState.QUEUED}
        removed = queues.remove(self._client, model, ours)
        # Whoever dies here leaves jobs that the reconciler finds missing.
        return unclaim(self._database, [in_flight[task_id] for task_id in removed])

    def _publish(self, jobs: list[ClaimedJob]) -> None:
        try:
            self._publisher.publish(Publication.of(job) for job in jobs)
            for job in jobs:
                log.debug("job queued", extra={"job": job.id, "attempt": job.attempt})
        except QueueUnreachable:
            # Should some have been queued after all, their second message will find them live or done.
            unclaim(self._database, jobs)
            raise

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
