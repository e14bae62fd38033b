"""Celery's remote control for those who may only look."""

from __future__ import annotations

from typing import Any

from celery.app.control import Control


class SilentControl(Control):  # type: ignore[misc]
    """Sends nothing and hears no answers: for accounts that may not publish to the control channel."""

    def broadcast(self, *args: Any, **options: Any) -> None:
        """Tell nobody anything."""
