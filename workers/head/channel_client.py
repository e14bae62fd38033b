"""A front's end of the local socket to its engine."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from tasks.generation import GenerationTask
from workers.errors import WorkerError
from workers.head.channel_messages import (
    MAX_MESSAGE_BYTES,
    Consuming,
    Finished,
    HandedBack,
    MessageInvalid,
    Progress,
    Started,
    Submit,
    decode_to_front,
    encode,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is gone, and with it what it did for the task."""

    task_id: str


Event = Started | Progress | Finished | HandedBack | EngineLost


class EngineUnreachable(WorkerError):
    """There is no engine at the address, or it refuses this front."""


class Generation:
    """One delivery of a task, waiting for what the engine tells about it."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Tell this delivery."""
        self._events.put(event)

    def next_event(self) -> Event:
        """Wait for the next event. `Finished`, `HandedBack` or `EngineLost` is the last one and always comes."""
        return self._events.get()


class EngineClient:
    """Submits tasks and hears about them. Thread-safe.

    `on_consuming` and `on_lost` are called from the reading thread. Once `hand_back` was called, every
    delivery, also one submitted later, is handed back; once the engine is lost, it is lost with it.

    Raises:
        EngineUnreachable: no engine listens at `address`, or the key is not its key.
    """

    def __init__(
        self,
        address: str,
        authkey: bytes,
        on_consuming: Callable[[bool], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_consuming = on_consuming
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._waiting: dict[str, list[Generation]] = {}
        #: what every delivery is told from now on; None while the engine serves us
        self._over: type[HandedBack | EngineLost] | None = None
        self._closed = False
        self._socket, self._connection = _connect(address, authkey)
        self._reader = threading.Thread(target=self._read, name="engine-read", daemon=True)
        self._reader.start()

    def submit(self, task: GenerationTask, *, suspect: bool = False) -> Generation:
        """Bring a task to the engine."""
        generation = Generation(task.task_id)
        with self._lock:
            over = self._over
            if over is None:
                self._waiting.setdefault(task.task_id, []).append(generation)
        if over is not None:
            generation.put(over(task.task_id))
            return generation
        try:
            with self._send_lock:
                self._connection.send_bytes(encode(Submit(task, suspect)))
        except OSError:
            self._cut()  # the reader notices and hands everything back
        return generation

    def hand_back(self) -> None:
        """Stop waiting: every delivery's message is to go back to the queue."""
        self._end(HandedBack)

    def close(self) -> None:
        """Leave the engine; safe to call twice."""
        self._closed = True
        self._cut()
        self._reader.join()

    def _end(self, over: type[HandedBack | EngineLost]) -> None:
        with self._lock:
            self._over = over
            waiting, self._waiting = self._waiting, {}
        for task_id, generations in waiting.items():
            for generation in generations:
                generation.put(over(task_id))

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                self._dispatch(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, MessageInvalid) as error:
            if not self._closed:
                logger.warning("lost the engine: %s: %s", type(error).__name__, error)
        self._end(EngineLost)
        with self._send_lock:
            self._connection.close()
            self._socket.close()
        if not self._closed:
            self._on_lost()

    def _dispatch(self, data: bytes) -> None:
        message = decode_to_front(data)
        if isinstance(message, Consuming):
            self._on_consuming(message.on)
            return
        last = isinstance(message, Finished | HandedBack)
        with self._lock:
            if last:
                generations = self._waiting.pop(message.task_id, [])
            else:
                generations = list(self._waiting.get(message.task_id, []))
        for generation in generations:
            generation.put(message)


def _connect(address: str, authkey: bytes) -> tuple[socket.socket, Connection]:
    """The socket, kept to cut the connection from any thread, and the connection on a duplicate of it."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.connect(address)
        connection = Connection(os.dup(raw.fileno()))
        answer_challenge(connection, authkey)
        deliver_challenge(connection, authkey)
    except (OSError, EOFError, AuthenticationError) as error:
        raw.close()
        raise EngineUnreachable(f"no engine at {address}: {type(error).__name__}: {error}") from error
    return raw, connection
