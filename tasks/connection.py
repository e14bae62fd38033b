"""The one way to a queue-server connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import AuthenticationError, AuthorizationError, OutOfMemoryError, ReadOnlyError
from redis.retry import Retry

from relay.causes import distrust, refusal, silence
from relay.errors import RelayRefused
from relay.greeting import noticing
from relay.tls import Address, address_of
from tasks.errors import QueueFull, QueueRefused, QueueUnreachable, TaskError
from tasks.settings import TaskSettings

#: the variable with the server's address
SETTING = "SHARDQ_BROKER_URL"
#: seconds after which a command or a connection attempt is given up
SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
#: seconds of silence after which a connection is tested before it is used
HEALTH_CHECK_S = 5
#: seconds between two messages about one outage
REPEAT_S = 60.0


def check_settings(settings: TaskSettings) -> Address:
    """The queue server's address; an unsafe one is refused (QueueRefused) before anything is sent to it."""
    try:
        return address_of(
            settings.broker_url,
            settings.tls_ca,
            allow_insecure=settings.allow_insecure,
            setting=SETTING,
        )
    except RelayRefused as error:
        raise QueueRefused(str(error)) from error


class _Pool(redis.ConnectionPool):
    """Drops its idle connections when one breaks in use: what broke that one has most likely broken them, too.

    On a half-open link each of them would cost a timeout of its own, one after the other.
    """

    def release(self, connection: Connection) -> None:  # type: ignore[override]
        broken = not connection.is_connected
        super().release(connection)
        if broken:
            self.disconnect(inuse_connections=False)


def connect(settings: TaskSettings, *, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A thread-safe client of the queue server; connects at its first command.

    A connection that turns out to be dead is replaced and the command sent once more; a timeout is not
    retried. A command is given up after `timeout_s`. Raises QueueRefused for an unsafe address.
    """
    address = check_settings(settings)
    pool = _Pool.from_url(
        address.url,
        socket_timeout=timeout_s,
        socket_connect_timeout=min(timeout_s, CONNECT_TIMEOUT_S),
        health_check_interval=HEALTH_CHECK_S,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        protocol=2,
        **noticing(address.url),
        **address.tls,
    )
    return redis.Redis.from_pool(pool)


def as_task_error(error: redis.RedisError) -> TaskError | None:
    """This package's error for one of the client's, with what to do; None for one that is a mistake of our own."""
    if text := distrust(error, SETTING):
        return QueueRefused(f"the queue server's certificate is not accepted: {text}")
    if text := refusal(error, SETTING):
        if isinstance(error, redis.ResponseError | AuthenticationError | AuthorizationError):
            return QueueRefused(f"the queue server refuses us: {text}")
        return QueueRefused(f"the queue server cannot be used: {text}")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return QueueUnreachable(f"the queue server does not answer: {silence(error, SETTING)}")
    if isinstance(error, OutOfMemoryError):
        return QueueFull("the queue server is out of memory (maxmemory): give it more, or wait until jobs are done")
    if isinstance(error, ReadOnlyError):
        return QueueFull("the queue server is read-only: it is a replica, not the server that jobs are queued on")
    if isinstance(error, redis.ResponseError) and str(error).startswith(("MISCONF", "NOREPLICAS")):
        return QueueFull(f"the queue server takes no writes: {error}")
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Turn the client's errors into this package's.

    The functions of this package that take a client let its errors pass; the edges translate them.
    """
    try:
        yield
    except redis.RedisError as error:
        translation = as_task_error(error)
        if translation is None:
            raise
        raise translation from error


class Outage:
    """Says loudly when the queue server fails us, again each minute that it lasts, and when it is over.

    Thread-safe. `consequence` is the end of the sentence: what happens meanwhile.
    """

    def __init__(self, log: logging.Logger, consequence: str) -> None:
        self._log = log
        self._consequence = consequence
        self._lock = threading.Lock()
        #: steady time of the last message; None while all is well
        self._said: float | None = None

    def failed(self, error: redis.RedisError) -> None:
        """A command failed."""
        with self._lock:
            now = time.monotonic()
            if self._said is not None and now - self._said < REPEAT_S:
                return
            self._said = now
        self._log.error("%s; %s", as_task_error(error) or error, self._consequence)

    def over(self) -> None:
        """A command succeeded."""
        if self._said is None:
            return
        with self._lock:
            was_out, self._said = self._said is not None, None
        if was_out:
            self._log.warning("the queue server works again")


def ping(client: redis.Redis) -> None:
    """Check that the queue server answers. Raises QueueUnreachable or QueueRefused."""
    with translated():
        client.ping()
