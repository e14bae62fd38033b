"""How the dashboard looks at jobs and heads: without asking them anything."""

from __future__ import annotations

from typing import Any

from celery import states
from celery.app.control import Control
from celery.events.state import TASK_EVENT_TO_STATE


class SilentControl(Control):  # type: ignore[misc]
    """Sends nothing and hears no answers: for accounts that may not publish to the control channel."""

    def broadcast(self, *args: Any, **options: Any) -> None:
        """Tell nobody anything."""


def show_progress_as_started() -> None:
    """Have this process take a job that reports progress for one that runs.

    Celery makes a state `PROGRESS` of the event, and would let it stand when the job is cancelled later.
    """
    TASK_EVENT_TO_STATE["progress"] = states.STARTED
