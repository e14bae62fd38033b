"""Small jobs done beside the threads that ask for them: writes whose reply nobody waits for."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """Daemon threads that call what they are given, first come first served. Failures are logged."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        for index in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True).start()

    def do(self, call: Callable[[], None]) -> None:
        """Call this soon."""
        self._calls.put(call)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything asked for is done; False if it takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._calls.all_tasks_done:
            while self._calls.unfinished_tasks:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._calls.all_tasks_done.wait(remaining)
        return True

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            except Exception:
                logger.exception("%s failed", self._name)
            finally:
                self._calls.task_done()
