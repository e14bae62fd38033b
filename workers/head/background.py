"""Small jobs done beside the threads that ask for them: writes whose reply nobody waits for."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """A daemon thread that calls what it is given, first come first served. Failures are logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def do(self, call: Callable[[], None]) -> None:
        """Call this soon."""
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            except Exception:
                logger.exception("%s failed", self._name)
