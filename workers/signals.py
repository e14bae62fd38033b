"""Ending a worker in order."""

from __future__ import annotations

import signal
import threading
import time


def stop_on_signals(until: float | None = None) -> threading.Event:
    """An event that SIGTERM and SIGINT set, and the clock at `until`, in seconds since the epoch.

    A second signal ends the process at once, as by default.
    """
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if until is not None:
        timer = threading.Timer(max(0.0, until - time.time()), stop.set)
        timer.daemon = True
        timer.start()
    return stop
