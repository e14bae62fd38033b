"""Put generation tasks on the queue, many per round trip."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kombu.exceptions import KombuError

from storage.job_records import ClaimedJob
from tasks import bell, keys
from tasks.app import make_app, model_queue
from tasks.connection import check_settings
from tasks.errors import QueueUnreachable
from tasks.generate import NAME
from tasks.generation import GenerationRequest, GenerationTask
from tasks.settings import TaskSettings

log = logging.getLogger(__name__)

#: messages sent to the server at a time
PUBLISH_BATCH = 500


@dataclass(frozen=True, slots=True)
class Publication:
    """A task and how urgent it is."""

    task: GenerationTask
    #: 0 is served first, 9 last
    priority: int = 0

    @property
    def version(self) -> int:
        """The lowest version that carries the task: any more, and heads that could do it would never get it."""
        return self.task.request.version

    @classmethod
    def of(cls, job: ClaimedJob) -> Publication:
        """What a stored job looks like on the queue."""
        request = GenerationRequest.from_json(json.loads(job.request))
        task = GenerationTask(job.id, job.attempt, job.batch_id, job.custom_id, job.model, request)
        return cls(task, job.priority)


def publications(jobs: Iterable[ClaimedJob]) -> tuple[dict[str, Publication], list[ClaimedJob]]:
    """What can be published, by the job's id, and the jobs that cannot: a later version wrote their requests."""
    found, unreadable = {}, []
    for job in jobs:
        try:
            found[job.id] = Publication.of(job)
        except (ValueError, RecursionError) as error:
            log.warning("a job that this version cannot read waits: %s", error, extra={"job": job.id})
            unreadable.append(job)
    return found, unreadable


class Publisher:
    """A writer to the queue server. A context manager; not thread-safe."""

    def __init__(self, settings: TaskSettings) -> None:
        check_settings(settings)
        self._app = make_app(settings)
        self._connection: Any = self._app.connection_for_write()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next `publish` opens it again."""
        self._connection.release()

    def publish(self, publications: Iterable[Publication]) -> int:
        """Queue the tasks, first come first served within a priority, and return their number.

        Raises QueueUnreachable; some of the tasks may then be queued. Queueing one again is safe: the second
        message joins the first one or finds its result.
        """
        count = 0
        models = set()
        try:
            with self._connection.channel() as channel:
                with self._app.amqp.Producer(channel) as producer, producer.batch(PUBLISH_BATCH):
                    for publication in publications:
                        self._send(producer, publication)
                        models.add(publication.task.model)
                        count += 1
                with channel.conn_or_acquire() as client:
                    bell.ring(client, map(keys.queue, sorted(models)))
        except (KombuError, *self._connection.connection_errors, *self._connection.channel_errors) as error:
            self.close()
            raise QueueUnreachable(f"queueing {count} jobs failed: {error}") from error
        return count

    def _send(self, producer: Any, publication: Publication) -> None:
        task = publication.task
        self._app.send_task(
            NAME,
            args=(task.to_json(),),
            task_id=task.task_id,
            queue=model_queue(task.model, publication.version),
            priority=publication.priority,
            producer=producer,
            # a repeated batch would be queued twice; the caller knows better what to do
            retry=False,
            # else the sender subscribes to each result
            ignore_result=True,
            # what Flower and the logs show; a prompt is nobody's business there
            argsrepr=f"{task.custom_id} {task.batch} {task.model}",
            kwargsrepr="",
        )
