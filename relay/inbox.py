"""Frames that have arrived over any lane of a link, waiting to be taken."""

from __future__ import annotations

import logging
import queue
import threading
import time
from enum import Enum, auto
from typing import Generic, TypeVar

from relay.codec import MAX_FRAME_BYTES, decode
from relay.errors import FrameInvalid, LinkLost
from relay.messages import Message
from relay.transport import Received

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class _Mark(Enum):
    """What stands between the frames."""

    #: the link's end
    END = auto()
    #: whoever waits shall look up
    WAKE = auto()


class Inbox(Generic[M]):
    """Decodes frames as they come; drops, with a logged reason, malformed and misdirected ones."""

    def __init__(self, kinds: tuple[type[M], ...], name: str, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._kinds = kinds
        self._name = name
        self._max_bytes = max_bytes
        self._arrived: queue.SimpleQueue[Received[M] | _Mark] = queue.SimpleQueue()
        self._lost: LinkLost | None = None
        self._woken = False
        self._lock = threading.Lock()

    def deliver(self, lane: int, data: bytes) -> None:
        """Take in a frame, from any thread."""
        at = time.perf_counter()
        try:
            message = decode(data, self._max_bytes)
            if not isinstance(message, self._kinds):
                raise FrameInvalid(f"{type(message).__name__} does not belong in this direction")
        except FrameInvalid as error:
            log.warning("%s, lane %d: frame of %d bytes dropped: %s", self._name, lane, len(data), error)
            return
        self._arrived.put(Received(lane, message, len(data), at))

    def lose(self, error: LinkLost) -> bool:
        """End the link: after the frames so far `receive` raises `error`. False if it had ended already."""
        with self._lock:
            if self._lost is not None:
                return False
            self._lost = error
        self._arrived.put(_Mark.END)
        return True

    def wake(self) -> None:
        """As `transport.HeadLink.wake`."""
        with self._lock:
            if self._woken:  # one mark in the queue is enough
                return
            self._woken = True
        self._arrived.put(_Mark.WAKE)

    def receive(self, timeout_s: float) -> Received[M] | None:
        """As `transport.HeadLink.receive`."""
        try:
            received = self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait()
        except queue.Empty:
            return None
        if received is _Mark.WAKE:
            with self._lock:
                self._woken = False
            return None
        if received is _Mark.END:
            self._arrived.put(_Mark.END)
            raise LinkLost(str(self._lost)) from self._lost
        return received
