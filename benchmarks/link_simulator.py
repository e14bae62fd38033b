"""A TCP proxy that makes a near server look far away, over a thin, jittery or stalling link.

    python -m benchmarks.link_simulator --target 127.0.0.1:6379 --delay-ms 43 --listen 127.0.0.1:7000

A simulator is one link: the leg between one machine and a server. Each direction is a pipe: what is read at time t
is written at t + delay while more is being read, so any number of bytes can be under way. All connections share a
direction's bandwidth, in turns of 16 KB. Opening a connection costs a round trip, as on a real link. Losses are not
simulated, TCP hides them: they look like jitter or a stall. Nor is TCP's slow start.

A head and a tail whose legs have a one-way delay of RTT / 4 each are one RTT apart: head → server → tail, and back.

In Python: `with LinkSimulator(...) as link` (a thread) or `with link_simulator_process(...) as link` (a process of
its own, outside the measured program's GIL). Either can be given another shape while connections are open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import selectors
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import urlsplit, urlunsplit

#: bytes that a connection sends before the next one has its turn
_TURN = 1 << 14
#: bytes under way per direction and connection before nothing more is read, as full buffers on a real link would do
_MOST_UNDER_WAY = 16 << 20
#: seconds after which a server notices that a half-open connection's other end is gone
_LINGER_S = 30.0
#: seconds a started simulator may take to listen
_START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What a link is like. `up` is from whoever connects to the server."""

    #: one way
    delay_s: float = 0.0
    #: each piece takes up to this much longer, evenly spread; the order stays
    jitter_s: float = 0.0
    #: None: unlimited
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    #: nothing arrives for `stall_s`, every `stall_every_s` anew; 0: never
    stall_every_s: float = 0.0
    stall_s: float = 0.0

    @classmethod
    def leg(cls, rtt_ms: float, mbit_s: float | None = None) -> LinkShape:
        """One of two equal legs: over both, an exchange between their ends takes `rtt_ms`."""
        rate = None if mbit_s is None else mbit_s * 1e6 / 8
        return cls(delay_s=rtt_ms / 4000, up_bytes_per_s=rate, down_bytes_per_s=rate)


class _Stalls:
    """When the link stands still: by plan, and when told to."""

    def __init__(self, shape: LinkShape) -> None:
        self.shape = shape
        self._until = 0.0

    def stall(self, now: float, length_s: float) -> None:
        self._until = max(self._until, now + length_s)

    def over_at(self, now: float) -> float:
        """The time at which what is due now arrives: now, or the end of a stall."""
        over = max(now, self._until)
        every_s, length_s = self.shape.stall_every_s, self.shape.stall_s
        if every_s and over % every_s < length_s:
            over += length_s - over % every_s
        return over


class _Wire:
    """One direction of the link: its connections send in turns."""

    def __init__(self, bytes_per_s: float | None, loop: asyncio.AbstractEventLoop) -> None:
        self.bytes_per_s = bytes_per_s
        self._loop = loop
        self._busy = False
        self._free_at = 0.0
        #: those with something to send
        self._line: deque[_Pipe] = deque()

    def offer(self, pipe: _Pipe, data: bytes) -> None:
        """Send `data` when the pipe's turns come."""
        if self.bytes_per_s is None and not self._busy:
            pipe.sent(data, self._loop.time())
            return
        pipe.waiting.extend([data[start : start + _TURN] for start in range(0, len(data), _TURN)] or [data])
        if pipe not in self._line:
            self._line.append(pipe)
        if not self._busy:
            self._free_at = self._loop.time()
            self._turn()

    def _turn(self) -> None:
        """The wire is free: the next pipe sends one piece."""
        self._busy = bool(self._line)
        if not self._line:
            return
        pipe = self._line.popleft()
        data = pipe.waiting.popleft()
        if pipe.waiting:
            self._line.append(pipe)
        # from the time at which it became free, not from now: a timer's lateness costs no bandwidth
        self._free_at += len(data) / self.bytes_per_s if self.bytes_per_s else 0.0
        pipe.sent(data, self._free_at)
        self._loop.call_at(self._free_at, self._turn)


class _Pipe:
    """One direction of one connection. Empty data is its end, in every queue."""

    def __init__(self, source: _End, target: _End, wire: _Wire, extra_s: Callable[[], float], stalls: _Stalls) -> None:
        """`extra_s()` is how long the next piece is on its way once it has left."""
        self._source = source
        self._target = target
        self._wire = wire
        self._extra_s = extra_s
        self._stalls = stalls
        self._loop = asyncio.get_running_loop()
        self._num_bytes = 0
        #: not yet on the wire
        self.waiting: deque[bytes] = deque()
        #: (time due, data)
        self._under_way: deque[tuple[float, bytes]] = deque()
        source.received = self.take
        target.has_room = self.deliver

    def take(self, data: bytes) -> None:
        """The source has written `data`."""
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_UNDER_WAY:
            self._source.transport.pause_reading()
        self._wire.offer(self, data)

    def sent(self, data: bytes, left_at: float) -> None:
        """The last byte of `data` leaves at `left_at`."""
        due = left_at + self._extra_s()
        if self._under_way:
            due = max(due, self._under_way[-1][0])
        else:
            self._loop.call_at(due, self.deliver)
        self._under_way.append((due, data))

    def deliver(self) -> None:
        """Write what is due to the target, as far as it takes it."""
        now = self._loop.time()
        over = self._stalls.over_at(now)
        while over <= now and self._under_way and self._under_way[0][0] <= now and not self._target.full:
            self._write(self._under_way.popleft()[1])
        if self._under_way and not self._target.full:
            self._loop.call_at(max(over, self._under_way[0][0]), self.deliver)

    def _write(self, data: bytes) -> None:
        if not data:
            self._target.end()
            return
        if not self._target.is_half_open:
            self._target.transport.write(data)
        if self._num_bytes > _MOST_UNDER_WAY >= self._num_bytes - len(data):
            self._source.transport.resume_reading()
        self._num_bytes -= len(data)


class _End(asyncio.Protocol):
    """One of the two sockets of a connection."""

    transport: asyncio.Transport

    def __init__(self, begun: Callable[[_End], None]) -> None:
        self._begun = begun
        #: set by the pipes
        self.received: Callable[[bytes], None] = lambda data: None
        self.has_room: Callable[[], None] = lambda: None
        #: called when the connection is gone; True: it broke
        self.gone: Callable[[bool], None] = lambda broken: None
        #: takes no more for now
        self.full = False
        #: what it says is heard by nobody, and it hears nothing
        self.is_half_open = False
        self._num_ends = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._begun(self)

    def data_received(self, data: bytes) -> None:
        self.received(data)

    def eof_received(self) -> bool:
        if self.is_half_open:
            return False  # it gave up: closed here, and the other end is not told
        self.received(b"")
        self._end_one_way()
        return True  # the other way stays open

    def lose_peer(self) -> None:
        """Be half-open from now on."""
        self.is_half_open = True
        self.received = lambda data: None

    def end(self) -> None:
        """Nothing more will be written here."""
        if not self.transport.is_closing() and not self.is_half_open:
            with contextlib.suppress(OSError):  # it broke just now: `connection_lost` is about to be called
                self.transport.write_eof()
            self._end_one_way()

    def _end_one_way(self) -> None:
        self._num_ends += 1
        if self._num_ends == 2:
            self.transport.close()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self.has_room()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone(error is not None or self._num_ends < 2)


class LinkSimulator:
    """A link on a thread of this process. `port` is set once entered; `cut` breaks every open connection."""

    def __init__(
        self, target_host: str, target_port: int, shape: LinkShape, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._target = (target_host, target_port)
        self._shape = shape
        self.host = host
        self.port = port
        #: while True, new connections are closed at once
        self.refusing = False
        # epoll and kqueue wake up to a millisecond late, four times in a round trip over two legs
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._up = _Wire(shape.up_bytes_per_s, self._loop)
        self._down = _Wire(shape.down_bytes_per_s, self._loop)
        self._stalls = _Stalls(shape)
        self._random = random.Random(0)
        #: new connections are carried on from then on
        self._swallows_until = 0.0
        self._stop = asyncio.Event()
        self._listening = threading.Event()
        self._problem: OSError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[_End] = set()
        self._thread = threading.Thread(target=self._run, name="link-simulator", daemon=True)

    def url_for(self, url: str) -> str:
        """`url` of the target, with this link's address in place of the server's."""
        return _with_address(url, self.host, self.port)

    def cut(self) -> None:
        """Break every open connection now, losing what is under way."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def stall(self, length_s: float) -> None:
        """Let nothing arrive for `length_s` from now; nothing is lost."""
        self._loop.call_soon_threadsafe(lambda: self._stalls.stall(self._loop.time(), length_s))

    def swallow(self, length_s: float) -> None:
        """Leave every open connection half-open for good: bytes vanish both ways, and neither end is told.

        New connections get through once `length_s` is over, as when a router forgot what it knew and then works
        again.
        """
        self._loop.call_soon_threadsafe(self._swallow, length_s)

    def _swallow(self, length_s: float) -> None:
        self._swallows_until = self._loop.time() + length_s
        for end in self._ends:
            end.lose_peer()

    def reshape(self, shape: LinkShape) -> None:
        """Change what the link is like, for all that is sent from now on."""
        self._loop.call_soon_threadsafe(self._reshape, shape)

    def _reshape(self, shape: LinkShape) -> None:
        self._shape = self._stalls.shape = shape
        self._up.bytes_per_s, self._down.bytes_per_s = shape.up_bytes_per_s, shape.down_bytes_per_s

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(_START_TIMEOUT_S):
            raise TimeoutError("the link simulator did not start")
        if self._problem is not None:
            raise self._problem
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_TIMEOUT_S)

    def wait(self) -> None:
        """Until another thread leaves the context, or Ctrl-C."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._problem = error
            self._listening.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: _End(self._accept), self.host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        self._abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort_all(self) -> None:
        for end in self._ends:
            end.transport.abort()

    def _accept(self, near: _End) -> None:
        if self.refusing:
            near.transport.abort()
            return
        near.transport.pause_reading()
        self._watch(near, near)
        task = self._loop.create_task(self._connect(near))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, near: _End) -> None:
        """Carry a new connection on to the target."""
        hole_s = self._swallows_until - self._loop.time()
        await asyncio.sleep(max(2 * self._shape.delay_s, hole_s))  # the handshake's round trip
        try:
            _, far = await self._loop.create_connection(lambda: _End(lambda end: None), *self._target)
        except OSError:
            near.transport.abort()
            return
        self._watch(far, near)
        self._watch(near, far)
        if near.transport.is_closing():
            far.transport.abort()
            return
        _Pipe(near, far, self._up, self._extra_s, self._stalls)
        _Pipe(far, near, self._down, self._extra_s, self._stalls)
        near.transport.resume_reading()

    def _watch(self, end: _End, other: _End) -> None:
        """If `end` breaks, so does `other`; much later, if the connection is half-open."""

        def gone(broken: bool) -> None:
            self._ends.discard(end)
            if end.is_half_open:
                self._loop.call_later(_LINGER_S, other.transport.abort)
            elif broken:
                other.transport.abort()

        self._ends.add(end)
        end.gone = gone

    def _extra_s(self) -> float:
        return self._shape.delay_s + self._random.random() * self._shape.jitter_s


@dataclass(frozen=True, slots=True)
class LinkProcess:
    """A link in a process of its own."""

    #: the server's URL with the link's address
    url: str
    _input: IO[str]

    def reshape(self, shape: LinkShape) -> None:
        """As `LinkSimulator.reshape`; holds within milliseconds."""
        self._input.write(json.dumps(asdict(shape)) + "\n")
        self._input.flush()


@contextlib.contextmanager
def link_simulator_process(url: str, shape: LinkShape) -> Iterator[LinkProcess]:
    """A link to the server of `url`."""
    target = urlsplit(url)
    command = [sys.executable, str(Path(__file__).resolve()), "--shapes-from-stdin"]
    command += ["--target", f"{target.hostname}:{target.port or 6379}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        try:
            process.stdin.write(json.dumps(asdict(shape)) + "\n")
            process.stdin.flush()
            host, _, port = process.stdout.readline().strip().rpartition(":")
            if not port:
                raise RuntimeError("the link simulator did not start")
            yield LinkProcess(_with_address(url, host, int(port)), process.stdin)
        finally:
            # its stdin closes with us too, however we end
            process.stdin.close()


def _with_address(url: str, host: str, port: int) -> str:
    parts = urlsplit(url)
    account, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{account}{at}{host}:{port}"))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def _shape(arguments: argparse.Namespace) -> LinkShape:
    if arguments.shapes_from_stdin:
        return LinkShape(**json.loads(sys.stdin.readline()))
    return LinkShape(
        delay_s=arguments.delay_ms / 1e3,
        jitter_s=arguments.jitter_ms / 1e3,
        up_bytes_per_s=None if arguments.up_mbit_s is None else arguments.up_mbit_s / 8e-6,
        down_bytes_per_s=None if arguments.down_mbit_s is None else arguments.down_mbit_s / 8e-6,
        stall_every_s=arguments.stall_every_s,
        stall_s=arguments.stall_s,
    )


def _run_first() -> None:
    """A link does not wait for a core: ask for precedence over the programs it joins, where we may."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Put a TCP service at the far end of a simulated link.")
    parser.add_argument("--target", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=43.0, help="one way; default 43 (86 ms round trip)")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="up to this much more; default 0")
    parser.add_argument("--up-mbit-s", type=float, default=None, help="rate towards the target; default unlimited")
    parser.add_argument("--down-mbit-s", type=float, default=None, help="rate from the target; default unlimited")
    parser.add_argument("--stall-every-s", type=float, default=0.0, help="time between two stalls; default none")
    parser.add_argument("--stall-s", type=float, default=0.0, help="length of a stall")
    parser.add_argument("--shapes-from-stdin", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (target_host, target_port), (host, port) = arguments.target, arguments.listen
    link = LinkSimulator(target_host, target_port, _shape(arguments), host=host, port=port)
    with link, contextlib.suppress(KeyboardInterrupt):
        print(f"{link.host}:{link.port}", flush=True)
        if arguments.shapes_from_stdin:
            _run_first()
            for line in sys.stdin:
                link.reshape(LinkShape(**json.loads(line)))
        else:
            link.wait()


if __name__ == "__main__":
    main()
