"""A TCP proxy that makes a near server look far away: every byte arrives later, none arrives fewer per second.

    python -m benchmarks.delay_proxy --target 127.0.0.1:6379 --delay-ms 43 --listen 127.0.0.1:7000

Each direction is a pipe of its own: data read at time t is written at t + delay, while more is being read, so any
number of bytes can be under way. `--mbit-s` adds a link of that rate per connection and direction, in front of the
delay. Opening a connection costs a round trip, as on a real link. In Python: `with DelayProxy(...) as proxy`
(a thread) or `with delay_proxy_process(...) as url` (a process of its own, outside the measured program's GIL).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

#: bytes read at a time
_CHUNK = 1 << 16
#: bytes under way per direction before the proxy stops reading, as full buffers along a real link would
_MOST_UNDER_WAY = 16 << 20
#: seconds a started proxy may take to listen
_START_TIMEOUT_S = 10.0


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        delay_s: float,
        bytes_per_s: float | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        #: (time due, data); empty data is the end
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._num_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take())
            group.create_task(self._give())

    async def _take(self) -> None:
        clock = asyncio.get_running_loop().time
        link_free_at = 0.0
        while True:
            await self._room.wait()
            try:
                data = await self._reader.read(_CHUNK)
            except ConnectionError:
                data = b""
            sent_at = clock()
            if self._bytes_per_s is not None:
                sent_at = max(sent_at, link_free_at) + len(data) / self._bytes_per_s
                link_free_at = sent_at
            self._num_bytes += len(data)
            if self._num_bytes > _MOST_UNDER_WAY:
                self._room.clear()
            self._under_way.put_nowait((sent_at + self._delay_s, data))
            if not data:
                return

    async def _give(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await self._under_way.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not data:
                with contextlib.suppress(OSError, RuntimeError):
                    self._writer.write_eof()
                return
            self._num_bytes -= len(data)
            self._room.set()
            with contextlib.suppress(ConnectionError):
                self._writer.write(data)
                await self._writer.drain()


class DelayProxy:
    """The proxy on a thread of this process. `port` is set once entered; `cut` breaks every open connection."""

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        delay_s: float,
        bytes_per_s: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`delay_s` is one way; a round trip takes twice that."""
        self._target = (target_host, target_port)
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self.host = host
        self.port = port
        #: while True, new connections are closed at once
        self.refusing = False
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._listening = threading.Event()
        self._problem: OSError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="delay-proxy", daemon=True)

    def url_for(self, url: str) -> str:
        """`url` of the target, with this proxy's address in place of the server's."""
        return _with_address(url, self.host, self.port)

    def cut(self) -> None:
        """Break every open connection now, losing what is under way."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(_START_TIMEOUT_S):
            raise TimeoutError("the delay proxy did not start")
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
        server = await asyncio.start_server(self._accept, self.host, self.port, limit=_CHUNK)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        self._abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self.refusing:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # the handshake's round trip
        await asyncio.sleep(2 * self._delay_s)
        far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_CHUNK)
        self._writers.add(far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_Pipe(reader, far_writer, self._delay_s, self._bytes_per_s).run())
                group.create_task(_Pipe(far_reader, writer, self._delay_s, self._bytes_per_s).run())
        finally:
            self._writers.discard(far_writer)
            far_writer.transport.abort()


@contextlib.contextmanager
def delay_proxy_process(url: str, *, delay_s: float, bytes_per_s: float | None = None) -> Iterator[str]:
    """A proxy in front of the server of `url`, in a process of its own; yields the URL to use instead."""
    target = urlsplit(url)
    command = [sys.executable, str(Path(__file__).resolve()), "--until-stdin-closes", "--delay-ms", str(delay_s * 1000)]
    command += ["--target", f"{target.hostname}:{target.port or 6379}"]
    if bytes_per_s is not None:
        command += ["--mbit-s", str(bytes_per_s * 8 / 1e6)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        try:
            host, _, port = process.stdout.readline().strip().rpartition(":")
            if not port:
                raise RuntimeError("the delay proxy did not start")
            yield _with_address(url, host, int(port))
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Delay a TCP service, to simulate a long link.")
    parser.add_argument("--target", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=43.0, help="one way; default 43 (86 ms round trip)")
    parser.add_argument("--mbit-s", type=float, default=None, help="rate per connection and direction; default none")
    parser.add_argument("--until-stdin-closes", action="store_true")
    arguments = parser.parse_args()
    proxy = DelayProxy(
        *arguments.target,
        delay_s=arguments.delay_ms / 1000,
        bytes_per_s=None if arguments.mbit_s is None else arguments.mbit_s * 1e6 / 8,
        host=arguments.listen[0],
        port=arguments.listen[1],
    )
    with proxy, contextlib.suppress(KeyboardInterrupt):
        print(f"{proxy.host}:{proxy.port}", flush=True)
        if arguments.until_stdin_closes:
            sys.stdin.read()
        else:
            proxy.wait()


if __name__ == "__main__":
    main()
