"""The engine's end of the local socket through which Celery fronts bring it jobs.

A Unix socket in a directory only this user may enter, authenticated by a key both sides were given
(`multiprocessing.connection`'s challenge), carrying length-prefixed msgpack. Nothing is ever pickled. Fronts
come and go at any time; what one of them waited for stays live in the registry, for the front that gets the
message next.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from tasks.generation import GenerationTask, Outcome
from workers.head.channel_messages import (
    MAX_MESSAGE_BYTES,
    Consuming,
    Finished,
    HandedBack,
    MessageInvalid,
    Progress,
    Started,
    Submit,
    ToFront,
    decode_to_engine,
    encode,
)
from workers.head.registry import Registry

logger = logging.getLogger(__name__)

#: a front that does not read is cut off once this much waits for it: the largest message, and as much before it
MAX_UNREAD_BYTES = 2 * MAX_MESSAGE_BYTES
#: seconds before the next attempt to accept a front after one failed
ACCEPT_AGAIN_S = 0.5
#: longest path a Unix socket may have everywhere (macOS: 104, Linux: 108)
_MAX_PATH = 100
#: file in the socket's directory that is locked as long as the engine lives
_LOCK_NAME = "lock"
#: seconds within which a new lock file is locked
_LOCKED_WITHIN_S = 10.0


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """A path for the socket in a new directory (mode 0700) that is removed at the end."""
    room = _MAX_PATH - len("/shardq-12345678/engine")
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= room else "/tmp"
    sweep(Path(root))
    with (
        tempfile.TemporaryDirectory(prefix="shardq-", dir=root) as directory,
        (Path(directory) / _LOCK_NAME).open("wb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield str(Path(directory) / "engine")


def sweep(root: Path) -> None:
    """Remove the directories of engines that were killed: nobody holds their locks any more."""
    for path in root.glob(f"shardq-????????/{_LOCK_NAME}"):
        try:
            with path.open("rb") as lock:
                about = os.fstat(lock.fileno())
                # one that was just made may not be locked yet
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > _LOCKED_WITHIN_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)
        except OSError:
            continue  # in use, another user's, or gone already


class EngineServer:
    """Takes tasks from any number of fronts and tells each what becomes of its own. Thread-safe.

    `deliver(task, suspect)` is called from the fronts' threads, once per task id that is neither live nor
    remembered as finished; it must not block. No method here waits for a front.
    """

    def __init__(self, address: str, authkey: bytes, deliver: Callable[[GenerationTask, bool], None]) -> None:
        self._address = address
        self._authkey = authkey
        self._deliver = deliver
        self._registry: Registry[_FrontLink] = Registry()
        self._lock = threading.Lock()
        self._fronts: set[_FrontLink] = set()
        self._consuming = False
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen(64)
        self._acceptor = threading.Thread(target=self._accept, name="channel-accept", daemon=True)
        self._acceptor.start()

    @property
    def num_fronts(self) -> int:
        """Fronts connected now."""
        with self._lock:
            return len(self._fronts)

    @property
    def consuming(self) -> bool:
        """Whether the fronts take messages now."""
        return self._consuming

    def live(self) -> tuple[str, ...]:
        """Ids of the tasks delivered and not yet ended."""
        return self._registry.live()

    def started(self, task_id: str) -> None:
        """The task got a slot."""
        self._send(self._registry.start(task_id), Started(task_id))

    def progress(self, task_id: str, num_tokens: int, tps: float | None) -> None:
        """The task has `num_tokens` completion tokens so far, at `tps` tokens/s."""
        self._send(self._registry.waiting(task_id), Progress(task_id, num_tokens, tps))

    def finish(self, task_id: str, outcome: Outcome) -> None:
        """The task ended. Later deliveries of it get this outcome as long as it is remembered.

        Texts too large for a message are left out: their job fails, once, instead of its front at every delivery.
        """
        logger.info("generation ended: %s", _end(outcome), extra={"task": task_id})
        data = encode(Finished(task_id, outcome))
        if len(data) > MAX_MESSAGE_BYTES:
            reason = _too_large(outcome, len(data))
            logger.error("%s", reason, extra={"task": task_id})
            data = encode(Finished(task_id, outcome.without_texts(reason)))
        for front in self._registry.finish(task_id, data):
            front.send(data)

    def hand_back(self, task_id: str) -> None:
        """Give the task up: its message returns to the queue, its next delivery is a new one.

        The fronts take nothing until `set_consuming` lets them again: they would take this message again at once.
        """
        self.set_consuming(False)
        self._send(self._registry.drop(task_id), HandedBack(task_id))

    def set_consuming(self, on: bool) -> None:
        """Let the fronts, those to come too, take messages from the queue or leave it alone. Off at first."""
        with self._lock:
            if self._consuming == on:
                return
            self._consuming = on
            self._send(list(self._fronts), Consuming(on))

    def close(self) -> None:
        """Cut every front off, which makes it hand its messages back; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            fronts = list(self._fronts)
        for front in fronts:
            front.cut()
        self._wake_acceptor()
        self._acceptor.join()
        self._socket.close()
        Path(self._address).unlink(missing_ok=True)

    def _send(self, fronts: list[_FrontLink], message: ToFront) -> None:
        if fronts:
            data = encode(message)
            for front in fronts:
                front.send(data)

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:  # out of descriptors, or the front was gone already: the next one may come in
                if not self._closed:
                    logger.warning("no front can be accepted, trying again: %s", error)
                    time.sleep(ACCEPT_AGAIN_S)
                continue
            if self._closed:
                accepted.close()
                return
            try:
                front = _FrontLink(accepted)
                threading.Thread(target=self._serve, args=(front,), name="channel-front", daemon=True).start()
            except (OSError, RuntimeError) as error:  # out of descriptors, or of threads
                logger.warning("lost a front: %s", error)
                with contextlib.suppress(OSError):
                    accepted.shutdown(socket.SHUT_RDWR)
                accepted.close()

    def _wake_acceptor(self) -> None:
        """So that it ends. A listening socket cannot be shut down everywhere, and to knock takes a descriptor."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
            knock.connect(self._address)

    def _serve(self, front: _FrontLink) -> None:
        """One front, from its challenge to its end."""
        try:
            front.authenticate(self._authkey)
            self._join(front)
            while True:
                self._take(front, decode_to_engine(front.receive()))
        except EOFError:
            logger.debug("a front left")
        except (OSError, AuthenticationError, MessageInvalid) as error:
            logger.warning("lost a front: %s: %s", type(error).__name__, error)
        finally:
            self._leave(front)

    def _join(self, front: _FrontLink) -> None:
        with self._lock:
            if self._closed:
                raise EOFError
            self._fronts.add(front)
            front.send(encode(Consuming(self._consuming)))

    def _leave(self, front: _FrontLink) -> None:
        with self._lock:
            self._fronts.discard(front)
        self._registry.leave(front)
        front.close()

    def _take(self, front: _FrontLink, message: Submit) -> None:
        task_id = message.task.task_id
        joined = self._registry.join(task_id, front)
        if joined.finished is not None:
            front.send(joined.finished)
        elif joined.new:
            logger.debug("job delivered", extra={"task": task_id})
            self._deliver(message.task, message.suspect)
        elif joined.started:
            front.send(encode(Started(task_id)))


def _end(outcome: Outcome) -> str:
    """How it ended, for the log."""
    reason = outcome.failure or outcome.stopped or outcome.finish_reason
    return f"{reason} after {outcome.num_tokens} tokens"


def _too_large(outcome: Outcome, num_bytes: int) -> str:
    return (
        f"the outcome of {1 + len(outcome.choices)} completions, {outcome.num_tokens} tokens, has {num_bytes} bytes, "
        f"a message {MAX_MESSAGE_BYTES} at most; ask for fewer completions (n) or tokens (max_tokens) in one request"
    )


class _FrontLink:
    """The connection to one front: reads in the caller's thread, writes in its own: no sender waits."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted
        # The connection owns a duplicate: cutting shuts the socket down, which wakes both threads, and only
        # the reader, once both are done, closes descriptors.
        self._connection = Connection(os.dup(accepted.fileno()))
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unread_bytes = 0
        self._writer = threading.Thread(target=self._write, name="channel-write", daemon=True)

    def authenticate(self, authkey: bytes) -> None:
        """Challenge the front and answer its challenge. Raises AuthenticationError."""
        deliver_challenge(self._connection, authkey)
        answer_challenge(self._connection, authkey)
        self._writer.start()

    def receive(self) -> bytes:
        """The front's next message; raises EOFError at its end."""
        return self._connection.recv_bytes(MAX_MESSAGE_BYTES)

    def send(self, data: bytes) -> None:
        """Queue a message; a front that does not read is cut off."""
        with self._lock:
            self._unread_bytes += len(data)
            full = self._unread_bytes > MAX_UNREAD_BYTES
        if full:
            logger.warning("cut off a front that does not read")
            self.cut()
        else:
            self._outbox.put(data)

    def cut(self) -> None:
        """End the connection, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free everything; for the reading thread, at its end."""
        self.cut()
        self._outbox.put(None)
        if self._writer.ident is not None:
            self._writer.join()
        self._connection.close()
        self._socket.close()

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(data)
            except OSError:
                self.cut()
                return
            with self._lock:
                self._unread_bytes -= len(data)
