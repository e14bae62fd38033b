"""Find jobs the queue server has lost and queue them again.

A claimed job whose feeder died before it published, a message within the last second before the server crashed, a
message that a foreign consumer took and dropped: the queue server loses some. The database is the truth: a job it
calls queued or running that shows no sign of life anywhere, in two scans `CONFIRM_S` apart, is queued again under
the same task id. Should its first message turn up after all, the second one joins it. Waiting in the queue, however
long, is a sign of life.

A scan reads every queued message, so it comes often only when there are fewer messages than jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import redis

from storage.database import Database
from storage.job_records import InFlightJob
from storage.jobs import queued_or_running, reclaim, unclaim, window
from tasks import keys, lease, queues
from tasks.heads import known_heads, live_heads
from tasks.publish import Publisher, publications
from tasks.served import model_names

log = logging.getLogger(__name__)

#: records in the results stream above which a scan is put off: the recorder is behind and will tell
MAX_UNRECORDED = 1000
#: seconds between two counts of jobs and messages
COUNT_S = 5.0
#: seconds after which a second scan proves that a job is lost
CONFIRM_S = 5.0
#: jobs asked for, and queued again, at a time
_CHUNK = 500
#: records looked at at a time: with log probabilities one is up to some 13 MB
_PAGE = 4


class Reconciler:
    """Remembers, from scan to scan, which jobs were missing. `interval_s`: seconds between two scans at most."""

    def __init__(self, database: Database, client: redis.Redis, publisher: Publisher, interval_s: float) -> None:
        self._database = database
        self._client = client
        self._publisher = publisher
        self._interval_s = interval_s
        self._scanned_at = float("-inf")
        #: task id → time of the first of the consecutive scans that missed it
        self._missing_since: dict[str, float] = {}

    def turn(self, now: float) -> int:
        """Scan if it is time, or if something seems to be missing; the number of jobs queued again."""
        is_due = now - self._scanned_at >= self._interval_s
        return self.scan(now) if is_due or self._missing_since or self._too_few_messages() else 0

    def scan(self, now: float) -> int:
        """Look for lost jobs and queue them again; returns how many. `now`: seconds of any steady clock.

        Raises QueueUnreachable; what was not queued then is lost still, and found by later scans.
        """
        if self._client.xlen(keys.RESULTS) > MAX_UNRECORDED:
            log.warning("scan for lost jobs put off: more than %d records wait", MAX_UNRECORDED)
            return 0
        self._scanned_at = now
        missing = self._missing()
        since = {task_id: self._missing_since.get(task_id, now) for task_id in missing}
        lost = [task_id for task_id, first in since.items() if now - first >= CONFIRM_S]
        self._missing_since = {task_id: since[task_id] for task_id in since.keys() - set(lost)}
        return sum(self._republish([missing[task_id] for task_id in chunk]) for chunk in _chunks(iter(lost)))

    def _too_few_messages(self) -> bool:
        """Whether jobs must be missing, from counts alone. Doubled messages may hide it: until the next scan."""
        names = model_names(self._client, self._database)
        num_jobs = sum(window(self._database, name).num_jobs for name in names)
        num_messages = sum(queues.num_waiting(self._client, name) for name in names)
        num_messages += sum(queues.num_unacked(self._client, head_id) for head_id in self._takers())
        return num_jobs > num_messages + self._client.xlen(keys.RESULTS)

    def _takers(self) -> list[str | None]:
        return [None, *sorted(known_heads(self._client))]

    def _missing(self) -> dict[str, InFlightJob]:
        """The jobs that should be under way and show no sign of life now, by task id."""
        names = model_names(self._client, self._database)
        missing = {f"{job.id}.{job.attempt}": job for name in names for job in queued_or_running(self._database, name)}
        # In the order in which a job moves: one that moves on meanwhile is still seen at its next place.
        for task_id in chain(self._queued_ids(names), self._taken_ids()):
            missing.pop(task_id, None)
        for chunk in _chunks(iter(list(missing))):
            self._drop_leased_or_done(chunk, missing)
        for task_id in self._unrecorded_ids() if missing else ():
            missing.pop(task_id, None)
        return missing

    def _queued_ids(self, names: list[str]) -> Iterator[str]:
        for name in names:
            yield from queues.waiting_ids(self._client, name)

    def _taken_ids(self) -> Iterator[str]:
        for head_id in self._takers():
            yield from queues.unacked_ids(self._client, head_id)
        for head in live_heads(self._client):
            yield from head.live

    def _drop_leased_or_done(self, task_ids: list[str], missing: dict[str, InFlightJob]) -> None:
        """A head has the attempt, or its outcome was published within the last hour."""
        values = self._client.mget([keys.job(task_id) for task_id in task_ids])
        for task_id, value in zip(task_ids, values, strict=True):
            if value is not None:
                del missing[task_id]

    def _unrecorded_ids(self) -> Iterator[str]:
        """The bookkeeper may have been away for longer than done markers live."""
        start = "-"
        while entries := self._records_from(start):
            yield from (fields.get(b"task", b"").decode() for _, fields in entries)
            start = f"({entries[-1][0].decode()}"

    def _records_from(self, start: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        entries: Any = self._client.xrange(keys.RESULTS, start, count=_PAGE)
        return list(entries)

    def _republish(self, jobs: list[InFlightJob]) -> int:
        claimed = reclaim(self._database, jobs)
        found, unreadable = publications(claimed)
        unclaim(self._database, unreadable)
        self._publisher.publish(found.values())
        for job in claimed:
            if job.id in found:
                log.warning("job was lost and is queued again", extra={"job": job.id, "attempt": job.attempt})
        return len(found)


def forget_done(client: redis.Redis, database: Database) -> int:
    """For a database that is new here, as a restored backup: no job that it has in flight counts as done.

    Their outcomes may have been recorded in the database that it replaces; then the next scans queue them again.
    Returns the number of these jobs.
    """
    names = model_names(client, database)
    task_ids = [f"{job.id}.{job.attempt}" for name in names for job in queued_or_running(database, name)]
    for task_id in task_ids:
        lease.give_back(client, keys.job(task_id), lease.DONE)
    return len(task_ids)


def _chunks(items: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(islice(items, _CHUNK)):
        yield chunk
