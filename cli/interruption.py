"""Ctrl-C: what it leaves behind is said, and an orderly end tells of it, too."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli.errors import Interrupted

log = logging.getLogger(__name__)


@contextmanager
def interruptible(left: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C within the block becomes an Interrupted with what `left` then says is left behind, and how to go on."""
    try:
        yield
    except Interrupted:
        raise  # told already, by who knows it better
    except KeyboardInterrupt as error:
        raise Interrupted(left()) from error


@contextmanager
def stop_on_signals(left: str, until: float | None = None) -> Iterator[threading.Event]:
    """For a process that runs until it is told to end: an event that SIGTERM and SIGINT set, and the clock at `until`.

    `until` is in seconds since the epoch. A second signal ends the process at once, as by default. `left`: what goes on
    without it, logged after SIGINT. Raises Interrupted when a block that SIGINT stopped has ended.
    """
    stop, interrupted = threading.Event(), threading.Event()

    def handle(number: int, frame: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            interrupted.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    if until is not None:
        timer = threading.Timer(max(0.0, until - time.time()), stop.set)
        timer.daemon = True
        timer.start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted.is_set():
        log.info("interrupted: %s", left)
        raise Interrupted
