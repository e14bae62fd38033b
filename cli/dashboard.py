"""Flower's pages as `shardq flower` shows them: heads instead of fronts, and nothing that changes anything.

Flower has no seams for this. What is put in the place of its own parts is put there before its application is made.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from flower import events
from flower.urls import handlers
from flower.views import BaseHandler
from flower.views.broker import BrokerView
from tornado import web

from tasks.watching import FrontsAsHeads

#: requests that change something or read results, by Flower's handlers
BLOCKED = (
    *("WorkerShutDown", "WorkerPoolRestart", "WorkerPoolGrow", "WorkerPoolShrink", "WorkerPoolAutoscale"),
    *("WorkerQueueAddConsumer", "WorkerQueueCancelConsumer"),
    *("TaskApply", "TaskAsyncApply", "TaskSend", "TaskAbort", "TaskResult"),
    *("TaskTimout", "TaskRateLimit", "TaskRevoke"),
)


class HeadsState(events.EventsState):  # type: ignore[misc]
    """What Flower keeps in memory, told by heads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._as_heads = FrontsAsHeads()

    def event(self, event: dict[str, Any]) -> None:
        """Take an event in."""
        shown = self._as_heads(event)
        if shown is not None:
            super().event(shown)


class HeadView(BaseHandler):  # type: ignore[misc]
    """A head's own page is the list of its jobs: nobody asks a head anything."""

    @web.authenticated
    def get(self, name: str) -> None:
        """Go there."""
        self.redirect(f"{self.reverse_url('tasks')}?worker={quote(name, safe='')}")


class ServedQueuesView(BrokerView):  # type: ignore[misc]
    """The queues of the served names, without Celery's own, which nobody uses."""

    def get_active_queue_names(self) -> list[str]:
        """In the order of their names."""
        return sorted(queue.name for queue in self.capp.conf.task_queues)


def show_heads() -> None:
    """Put our parts in the place of Flower's."""
    events.EventsState = HeadsState
    ours = {"WorkerView": HeadView, "BrokerView": ServedQueuesView}
    for place, handler in enumerate(handlers):
        if isinstance(handler, web.url) and (view := ours.get(handler.handler_class.__name__)):
            handlers[place] = web.url(handler.regex.pattern, view, name=handler.name)


def remove_blocked() -> None:
    """Take the `BLOCKED` requests out of Flower's page, which then answers 404 to them."""
    handlers[:] = [handler for handler in handlers if _class_of(handler).__name__ not in BLOCKED]


def _class_of(handler: Any) -> type[Any]:
    kind: type[Any] = handler[1] if isinstance(handler, tuple) else handler.handler_class
    return kind
