"""Keep a window of jobs queued: enough that no head waits, few enough for the server's memory."""

from __future__ import annotations

import logging
from collections import Counter

import redis

from storage.database import Database
from storage.job_records import ClaimedJob
from storage.jobs import claim_waiting, unclaim
from tasks import queues
from tasks.connection import connect, translated
from tasks.errors import QueueUnreachable
from tasks.heads import live_heads
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

    Several may run at once, `submit` beside the bookkeeper: each job is claimed by one, but what they claim stands in
    the queue in the order in which they publish, and for a moment there may be a window more for each.
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
        """Fill every served name's window; the number of jobs published.

        Raises QueueUnreachable; the jobs that were to be published then wait again.
        """
        if self._memory_is_short():
            return 0
        slots: Counter[str] = Counter()
        for head in live_heads(self._client):
            slots[head.model] += head.slots
        return sum(self._feed_model(name, slots[name]) for name in model_names(self._client, self._database))

    def _feed_model(self, model: str, slots: int) -> int:
        window = max(self._settings.window_min_jobs, self._settings.window_per_slot * slots)
        fed = 0
        while not self._memory_is_short():
            room = window - queues.num_waiting(self._client, model)
            room_bytes = self._settings.window_bytes - queues.num_waiting_bytes(self._client, model)
            jobs = claim_waiting(
                self._database,
                model,
                max_jobs=min(room, _CLAIM_JOBS),
                max_bytes=min(room_bytes // _BYTES_PER_REQUEST_BYTE, _CLAIM_BYTES),
            )
            if not jobs:
                break
            self._publish(jobs)
            fed += len(jobs)
        return fed

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

    Raises QueueUnreachable, QueueRefused or a StorageError.
    """
    client = connect(settings)
    try:
        with translated(), Publisher(settings) as publisher:
            return Feeder(database, client, publisher, settings).feed()
    finally:
        client.close()
