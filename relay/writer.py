"""Writes the frames of one stream without ever waiting for the server's replies.

All commands go out as soon as they come; the replies are read when they arrive. Each frame has its own entry
id, so after a broken connection everything unanswered is simply written again: what had arrived is refused as
not newer. The stream is never created here (`NOMKSTREAM`): a nil reply means that the epoch was ended or the
server lost it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import redis

from relay.connections import TRANSIENT, Connections, Line
from relay.errors import LinkLost

log = logging.getLogger(__name__)

#: name of an entry's only field
FRAME_FIELD = b"f"
#: entry that every frame stream is created with; frames start at 1-0
FIRST_ENTRY_ID = b"0-1"
#: seconds between two probes of an epoch's existence, which also keep a NAT's entry alive
PROBE_INTERVAL_S = 1.0
#: seconds for which a probe can be left out because something else is unanswered: that proves as much
PROBE_AT_LEAST_S = 30.0
#: seconds between two looks at how much of what was written has arrived
_LOOK_S = 1.0
#: bytes handed to the socket at a time
_PIECE = 1 << 16


class _Sense(Enum):
    """What a reply means."""

    FRAME = auto()
    #: an entry that is refused as long as the stream exists
    PROBE = auto()
    ANY = auto()


@dataclass(slots=True)
class _Command:
    args: tuple[bytes | str | int, ...]
    sense: _Sense
    #: written before, on a connection that broke
    repeated: bool = False


class FrameWriter:
    """The writing end of one stream; `send` may be called from any thread."""

    def __init__(
        self,
        connections: Connections,
        key: str,
        *,
        frames_kept: int,
        patience_s: float,
        lost: Callable[[LinkLost], None],
        renew: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """`renew`: keys and their life in seconds, renewed with each probe. `lost` is called at most once."""
        self._key = key
        self._frames_kept = frames_kept
        self._stall_s = patience_s / 2
        self._lost = lost
        self._renew = renew
        self._line = Line(connections, patience_s)
        self._sequence = 0
        self._lock = threading.Lock()
        self._finished = False
        self._waiting: deque[_Command] = deque()
        #: written on the present connection and not yet answered; the thread's own, like all below
        self._unanswered: deque[_Command] = deque()
        self._progress_at = 0.0
        self._probe_at = 0.0
        #: bytes on the present connection: written, and known to have arrived
        self._written = 0
        self._arrived = 0
        #: bytes in this pipe end the thread's wait; closed under the lock, so nobody writes to a reused
        #: descriptor
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._thread = threading.Thread(target=self._run, name=f"writer {key}", daemon=True)

    def open(self) -> None:
        """Connect; raises `RelayUnreachable` or `RelayRefused`."""
        self._line.open()

    def start(self) -> None:
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Queue a frame; returns at once. After a loss or `close` the frame goes nowhere."""
        with self._lock:
            if self._line.hung_up:
                return
            self._sequence += 1
            self._waiting.append(self._entry(f"{self._sequence}-0", frame, _Sense.FRAME))
            self._wake()

    def stop(self) -> None:
        """Stop soon, from any thread; frames not yet written are dropped."""
        with self._lock:
            if not self._line.hung_up:
                self._line.hang_up()
                self._wake()

    def join(self) -> None:
        """Wait for the thread's end after `stop`, and close everything."""
        if self._thread.ident is None:
            self._finish()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _entry(self, entry_id: str | bytes, frame: bytes, sense: _Sense) -> _Command:
        limit = ("NOMKSTREAM", "MAXLEN", "=", self._frames_kept)
        return _Command(("XADD", self._key, *limit, entry_id, FRAME_FIELD, frame), sense)

    def _wake(self) -> None:
        try:
            os.write(self._wake_in, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def _run(self) -> None:
        try:
            while not self._line.hung_up:
                try:
                    self._exchange()
                except TRANSIENT as error:
                    self._repeat_unanswered()
                    self._line.reopen(error)
        except LinkLost as error:
            self._end(error)
        except Exception as error:  # outermost loop of the thread
            log.exception("writer of %s failed", self._key)
            self._end(LinkLost(f"writer failed: {error!r}"))
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._line.hang_up()
            self._line.drop()
            self._waiting.clear()
            if not self._finished:
                self._finished = True
                os.close(self._wake_out)
                os.close(self._wake_in)

    def _end(self, error: LinkLost) -> None:
        if not self._line.hung_up:
            self._lost(error)

    def _repeat_unanswered(self) -> None:
        for command in reversed(self._unanswered):
            command.repeated = True
            if command.sense is _Sense.FRAME:
                self._waiting.appendleft(command)
        self._unanswered.clear()

    def _exchange(self) -> None:
        """Write and read on the present connection until it breaks or the line is hung up."""
        sock = self._line.socket
        self._progress_at = time.monotonic()
        self._probe_at = self._progress_at
        self._written = self._arrived = 0
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._line.hung_up:
                self._write_waiting(sock)
                ready = {key.fd for key, _ in selector.select(self._pause_s())}
                if self._wake_out in ready:
                    self._drain_wakes()
                if sock.fileno() in ready:
                    self._read_replies()
                self._check_progress(sock)

    def _pause_s(self) -> float:
        now = time.monotonic()
        due = min(now + _LOOK_S, self._progress_at + self._stall_s) if self._unanswered else self._probe_at
        return max(due - now, 0.001)

    def _drain_wakes(self) -> None:
        try:
            os.read(self._wake_out, 4096)
        except BlockingIOError:
            return

    def _write_waiting(self, sock: socket.socket) -> None:
        self._add_probe()
        while self._waiting and not self._line.hung_up:
            command = self._waiting.popleft()
            if not self._unanswered:
                self._progress_at = time.monotonic()
            self._unanswered.append(command)
            for chunk in self._line.connection.pack_command(*command.args):
                self._write(sock, memoryview(chunk))

    def _write(self, sock: socket.socket, data: memoryview) -> None:
        while data:
            num_bytes = sock.send(data[:_PIECE])
            self._written += num_bytes
            data = data[num_bytes:]

    def _add_probe(self) -> None:
        now = time.monotonic()
        # Not behind something unanswered: on a half-open connection whose other end's kernel still takes bytes, more
        # of them would look like progress.
        if now < self._probe_at + (PROBE_AT_LEAST_S if self._unanswered or self._waiting else 0.0):
            return
        self._probe_at = now + PROBE_INTERVAL_S
        self._waiting.append(self._entry(FIRST_ENTRY_ID, b"", _Sense.PROBE))
        self._waiting.extend(_Command(("EXPIRE", key, ttl_s), _Sense.ANY) for key, ttl_s in self._renew)

    def _read_replies(self) -> None:
        connection = self._line.connection
        while connection.can_read(timeout=0):
            try:
                reply = connection.read_response()
            except redis.ResponseError as error:
                reply = error
            self._progress_at = time.monotonic()
            self._line.answered()
            self._judge(self._unanswered.popleft(), reply)

    def _judge(self, command: _Command, reply: object) -> None:
        """Raise `LinkLost` unless `reply` says that all is well."""
        if isinstance(reply, redis.ResponseError):
            not_newer = "equal or smaller" in str(reply)
            if command.sense is _Sense.FRAME and not (not_newer and command.repeated):
                raise LinkLost(f"{self._key}: {reply}")
            if command.sense is _Sense.PROBE and not not_newer:
                raise LinkLost(f"{self._key}: {reply}")
            if command.sense is _Sense.ANY:
                raise LinkLost(f"{self._key}: {reply}")
        elif reply is None:
            raise LinkLost(f"{self._key}: the epoch was ended by the other side, or the server lost it")

    def _check_progress(self, sock: socket.socket) -> None:
        """Raise redis-py's TimeoutError where neither replies come nor what was written arrives."""
        arrived = self._written - _bytes_under_way(sock)
        if arrived > self._arrived:
            self._progress_at = time.monotonic()
        self._arrived = arrived
        if self._unanswered and time.monotonic() - self._progress_at > self._stall_s:
            raise redis.TimeoutError(f"no reply within {self._stall_s:g} s")


def _bytes_under_way(sock: socket.socket) -> int:
    """Bytes that the other end's system has not confirmed; 0 where ours does not tell."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    return 0
