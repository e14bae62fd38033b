"""Ends TLS in front of a server that has none: what the test's Valkey is to its clients, with a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

#: bytes moved at a time
_CHUNK = 1 << 16


class TlsProxy:
    """A context manager: takes TLS connections on `host` and passes their bytes on to `target_port`."""

    def __init__(
        self, target_port: int, certificate: Path, key: Path, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.port = port
        self._host = host
        self._target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tls-proxy", daemon=True)
        self._listening = threading.Event()
        self._stop: asyncio.Event
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(10)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._failure = error
        finally:
            self._listening.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._join, self._host, self.port, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        connections = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        with contextlib.suppress(OSError, asyncio.CancelledError):
            near, far = await asyncio.open_connection("127.0.0.1", self._target_port)
            both = [asyncio.ensure_future(_copy(reader, far)), asyncio.ensure_future(_copy(near, writer))]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                far.close()
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        target.write(data)
        await target.drain()
