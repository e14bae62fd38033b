"""The edge to redis-py: how connections are made and how its errors become the relay's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relay.causes import distrust, refusal, silence
from relay.errors import LinkLost, RelayError, RelayRefused, RelayUnreachable
from relay.greeting import noticing
from relay.guard import redact
from relay.tls import Address

#: errors after which a new connection may do better
TRANSIENT = (redis.ConnectionError, redis.TimeoutError, OSError)

#: the variable with the server's address
SETTING = "SHARDQ_RELAY_URL"
#: seconds between two attempts to connect, growing up to the second value
_BACKOFF_S = (0.05, 0.5)


def translate(error: Exception, url: str) -> RelayError:
    """The relay's error for one of redis-py's, naming the server without its password, the cause and what to do."""
    place = redact(url)
    if text := distrust(error, SETTING):
        return RelayRefused(f"the certificate of Redis at {place} is not accepted: {text}")
    if text := refusal(error, SETTING):
        # redis-py calls a refused password a connection error
        is_login = isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError)
        what = "refuses the login" if is_login else "refuses a command" if _is_answer(error) else "cannot be used"
        return RelayRefused(f"Redis at {place} {what}: {text}")
    if isinstance(error, TRANSIENT):
        return RelayUnreachable(f"Redis at {place} does not answer: {silence(error, SETTING)}")
    return RelayError(f"Redis at {place}: {error}")


def _is_answer(error: Exception) -> bool:
    return isinstance(error, redis.ResponseError)


class RawConnection(Protocol):
    """What is used of redis-py's `Connection`."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def pack_command(self, *args: bytes | str | int) -> list[bytes]: ...
    def send_command(self, *args: bytes | str | int, check_health: bool) -> None: ...
    def can_read(self, timeout: float) -> bool: ...
    def read_response(self) -> Any: ...
    def _get_socket(self) -> socket.socket | None: ...


class Connections:
    """Makes all connections to one server; repeats no command behind our back: a repeated XADD doubles."""

    def __init__(self, address: Address, *, answer_timeout_s: float, read_timeout_s: float) -> None:
        """A connection is given up when an answer takes longer; `read_timeout_s` holds for reads that may wait."""
        self.url = address.url
        common: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_read_size": 1 << 20,
            "decode_responses": False,
            "health_check_interval": 0,
            # raw connections read replies in the older, positional shape
            "protocol": 2,
            **noticing(address.url),
            **address.tls,
        }

        def pool(timeout_s: float) -> redis.ConnectionPool:
            timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
            return redis.ConnectionPool.from_url(address.url, **common, **timeouts)

        self._patient_pool = pool(read_timeout_s)
        #: for commands whose answer comes at once: what they keep alive must not lapse over a half-open connection
        self.client = redis.Redis(connection_pool=pool(answer_timeout_s))
        #: for reads that wait at the server
        self.reading = redis.Redis(connection_pool=self._patient_pool)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Runs client commands; redis-py's errors come out as the relay's."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise translate(error, self.url) from error

    def open(self) -> RawConnection:
        """A new connection, logged in; raises redis-py's errors."""
        pool = self._patient_pool
        connection = cast(RawConnection, pool.connection_class(**pool.connection_kwargs))
        connection.connect()
        return connection

    def close(self) -> None:
        """Close the client's connections; those from `open` belong to whoever opened them."""
        for client in (self.client, self.reading):
            client.close()
            client.connection_pool.disconnect()


class Line:
    """One raw connection that outlives short outages.

    Used by one thread, apart from `hang_up`. An outage begins with the last `answered` and may last
    `patience_s`.
    """

    def __init__(self, connections: Connections, patience_s: float) -> None:
        self._connections = connections
        self._patience_s = patience_s
        self._connection: RawConnection | None = None
        self._answered_at = time.monotonic()
        self._hung_up = threading.Event()

    @property
    def connection(self) -> RawConnection:
        if self._connection is None:
            raise RuntimeError("the line was never opened")
        return self._connection

    @property
    def socket(self) -> socket.socket:
        """The socket below; raises OSError when there is none any more."""
        # redis-py offers no way to send without waiting, nor to wait for two things at once
        sock = self.connection._get_socket()
        if sock is None:
            raise OSError("the connection is closed")
        return sock

    @property
    def hung_up(self) -> bool:
        return self._hung_up.is_set()

    def open(self) -> None:
        """Connect; raises `RelayUnreachable` or `RelayRefused`."""
        try:
            self._connection = self._connections.open()
        except (redis.RedisError, OSError) as error:
            raise translate(error, self._connections.url) from error
        self.answered()

    def answered(self) -> None:
        """The server has shown that it lives."""
        self._answered_at = time.monotonic()

    def reopen(self, cause: Exception) -> bool:
        """Connect again after `cause`. False once hung up; raises `LinkLost` if the outage is too long."""
        problem: Exception = cause
        pause_s, longest_s = _BACKOFF_S
        self.connection.disconnect()
        while not self._hung_up.is_set():
            error = translate(problem, self._connections.url)
            if not isinstance(error, RelayUnreachable):
                raise LinkLost(str(error)) from problem
            if time.monotonic() - self._answered_at > self._patience_s:
                raise LinkLost(f"gave up after {self._patience_s:g} s: {error}") from problem
            self._hung_up.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)
            try:
                self._connection = self._connections.open()
            except (redis.RedisError, OSError) as again:
                problem = again
            else:
                return True
        return False

    def hang_up(self) -> None:
        """From any thread: make the line's thread stop waiting. It then calls `drop`."""
        self._hung_up.set()
        sock = self._connection._get_socket() if self._connection is not None else None
        if sock is not None:
            # closing the descriptor here could hand its number to someone else while a thread still waits on
            # it
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def drop(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.disconnect()
