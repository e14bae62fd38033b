"""How the dashboard looks at jobs and heads: without asking them anything."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
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

#: seconds after which a front that was killed counts no more; they beat every 2 s
SILENT_S = 20.0
#: characters of a failure in the list of jobs: with them it fits 1,280 pixels
LONGEST_RESULT = 28
#: how fronts are called
_FRONT = re.compile(r"(?P<head>.+)-\d+@.*")


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


class FrontsAsHeads:
    """Celery's events with heads in place of their fronts: a user has started one head, not eight workers.

    Called with every event in turn; the event to show, or None for one that says nothing of the head.
    """

    def __init__(self) -> None:
        #: head → front → its last heartbeat
        self._beats: dict[str, dict[str, Mapping[str, Any]]] = {}

    def __call__(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """See the class."""
        kind, front = event["type"], event["hostname"]
        found = _FRONT.fullmatch(front)
        shown = {**event, "hostname": found["head"] if found else front}
        if kind == "task-received":
            shown["args"] = _without_batch(str(event.get("args")), event["uuid"])
        elif kind == "task-failed":
            shown["result"] = _cut(str(event.get("exception")))  # the column that a list of jobs has room for
        elif kind.startswith("task-"):
            shown["result"] = _flat(event.get("result"))
        if found and kind.startswith("worker-"):
            return self._of_head(shown, front)
        return shown

    def _of_head(self, event: dict[str, Any], front: str) -> dict[str, Any] | None:
        """A front's word on itself as the head's: its counts are those of all fronts, and the last one ends it."""
        beats = self._beats.setdefault(event["hostname"], {})
        if event["type"] == "worker-offline":
            beats.pop(front, None)
            return None if beats else event
        beats[front] = event
        for silent in [name for name, beat in beats.items() if event["timestamp"] - beat["timestamp"] > SILENT_S]:
            del beats[silent]
        counts = {name: sum(beat.get(name) or 0 for beat in beats.values()) for name in ("active", "processed")}
        return {**event, **counts}


def _without_batch(args: str, task_id: str) -> str:
    """`custom_id batch model` without the batch, where the task's id tells it, too: a row is short."""
    custom_id, batch, model = ["", "", *args.rsplit(" ", 2)][-3:]
    return f"{custom_id} {model}" if batch and task_id.startswith(f"{batch}-") else args


def _flat(result: object) -> object:
    """A dict as text in the form that running jobs tell: `tps=31.2 tokens=150`."""
    if not isinstance(result, str) or not result.startswith("{'"):
        return result
    return result.strip("{}").replace("'", "").replace("finish: ", "").replace(": ", "=").replace(",", "")


def _cut(text: str) -> str:
    """So that other columns stay in sight; a job's own page has all of it."""
    return text if len(text) <= LONGEST_RESULT else f"{text[: LONGEST_RESULT - 1]}…"


def show_progress_as_started() -> None:
    """Have this process take a job that reports progress for one that runs.

    Celery makes a state `PROGRESS` of the event, and would let it stand when the job is cancelled later.
    """
    TASK_EVENT_TO_STATE["progress"] = states.STARTED
