"""Put generation tasks on the queue, many per round trip."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from kombu.exceptions import KombuError

from tasks.app import make_app, model_queue
from tasks.connection import check_settings
from tasks.errors import QueueUnreachable
from tasks.generate import NAME
from tasks.generation import GenerationTask
from tasks.settings import TaskSettings

#: messages sent to the server at a time
PUBLISH_BATCH = 500


class Publisher:
    """One connection to the queue server. A context manager; not thread-safe."""

    def __init__(self, settings: TaskSettings) -> None:
        check_settings(settings)
        self._app = make_app(settings)
        self._connection = self._app.connection_for_write()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next `publish` opens a new one."""
        self._connection.release()

    def publish(self, tasks: Iterable[GenerationTask]) -> int:
        """Queue the tasks, first come first served, and return their number.

        Raises QueueUnreachable; some of the tasks may then be queued. Queueing one again is safe: the second
        message joins or finds the first one's result.
        """
        count = 0
        try:
            with self._connection.clone() as connection, connection.channel() as channel:
                producer = self._app.amqp.Producer(channel)
                with producer.batch(PUBLISH_BATCH):
                    for task in tasks:
                        self._send(producer, task)
                        count += 1
        except (KombuError, *self._connection.connection_errors) as error:
            raise QueueUnreachable(f"queueing failed after at most {count} jobs: {error}") from error
        return count

    def _send(self, producer: object, task: GenerationTask) -> None:
        self._app.send_task(
            NAME,
            args=(task.to_json(),),
            task_id=task.task_id,
            queue=model_queue(task.model),
            producer=producer,
            retry=False,
            # what Flower and the logs show; a prompt is nobody's business there
            argsrepr=f"custom_id={task.custom_id} batch={task.batch} model={task.model}",
            kwargsrepr="",
        )
