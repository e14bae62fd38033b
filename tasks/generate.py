"""The Celery task `shardq.generate`: one attempt at one job. Its body is a head's engine."""

from __future__ import annotations

from typing import Any, Protocol

from tasks.errors import NotAHead
from tasks.generation import GenerationTask

#: the task's name on the queue
NAME = "shardq.generate"


class GenerateExecutor(Protocol):
    """What a head's front installs as `app.executor`."""

    def run(self, request: Any, task: GenerationTask) -> dict[str, Any]:
        """Generate `task` and return a small summary for Flower, led by `tps`.

        `request` is the bound Celery task (`request.request.id`, `send_event`, …). Returns only after the
        outcome stands in the results stream, so that the acknowledgement that follows is safe. A second
        delivery of a live task joins the first. Raises `celery.exceptions.Reject(requeue=True)` to hand the
        message back.
        """

    def refuse(self, request: Any, value: object, reason: str) -> dict[str, Any]:
        """End the attempt that the message is about, which holds `value` where a task is expected.

        As `run`, with a failure for an outcome. A message that does not even name an attempt is put aside.
        """


def register(app: Any) -> Any:
    """Define the task on a Celery application and return it."""

    @app.task(name=NAME, bind=True, shared=False, acks_late=True, max_retries=0)  # type: ignore[untyped-decorator]
    def generate(self: Any, task: dict[str, Any]) -> dict[str, Any]:
        if self.app.executor is None:
            raise NotAHead("shardq.generate runs only inside `shardq head`; no engine is attached here")
        executor: GenerateExecutor = self.app.executor
        try:
            readable = GenerationTask.from_json(task)
        except ValueError as error:
            return executor.refuse(self, task, str(error))
        return executor.run(self, readable)

    return generate
