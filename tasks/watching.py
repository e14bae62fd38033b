"""How the dashboard looks at jobs and heads: without asking them anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import redis
from celery import states
from celery.app.control import Control
from celery.events.state import TASK_EVENT_TO_STATE

from tasks import keys
from tasks.app import model_queue
from tasks.connection import connect
from tasks.generation import known_versions
from tasks.settings import TaskSettings

log = logging.getLogger(__name__)


class SilentControl(Control):  # type: ignore[misc]
    """Sends nothing and hears no answers: for accounts that may not publish to the control channel."""

    def broadcast(self, *args: Any, **options: Any) -> None:
        """Tell nobody anything."""


class ServedQueues:
    """The queues of the names that are served, one for each version of the tasks; asked for at each loop.

    For `app.conf.task_queues`: a name may be served for the first time long after the dashboard's start.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self._client = connect(settings)

    def __iter__(self) -> Iterator[Any]:
        try:
            names: Any = self._client.hkeys(keys.MODELS)
        except redis.RedisError as error:
            log.warning("the served names cannot be read: %s", error)
            return
        for name in sorted(names):
            for version in known_versions():
                yield model_queue(name.decode(), version)


def show_progress_as_started() -> None:
    """Have this process take a job that reports progress for one that runs.

    Celery makes a state `PROGRESS` of the event, and would let it stand when the job is cancelled later.
    """
    TASK_EVENT_TO_STATE["progress"] = states.STARTED
