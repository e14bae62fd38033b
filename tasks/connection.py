"""The one way to a queue-server connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError
from redis.retry import Retry

from relay.errors import RelayRefused
from relay.guard import check_url
from tasks.errors import QueueRefused, QueueUnreachable
from tasks.settings import TaskSettings

#: seconds after which a command or a connection attempt is given up
SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
#: seconds of silence after which a connection is tested before it is used
HEALTH_CHECK_S = 5


def check_settings(settings: TaskSettings) -> None:
    """Refuse an unsafe queue server (QueueRefused) before anything is sent to it."""
    try:
        check_url(settings.broker_url, settings.allow_insecure, setting="SHARDQ_BROKER_URL")
    except RelayRefused as error:
        raise QueueRefused(str(error)) from error


def connect(settings: TaskSettings) -> redis.Redis:
    """A thread-safe client of the queue server; connects at its first command.

    A connection that turns out to be dead is replaced and the command sent once more; a timeout is not
    retried. Raises QueueRefused for an unsafe address.
    """
    check_settings(settings)
    return redis.Redis.from_url(
        settings.broker_url,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=HEALTH_CHECK_S,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        protocol=2,
    )


@contextmanager
def translated() -> Iterator[None]:
    """Turn the client's errors into this package's.

    The functions of this package that take a client let its errors pass; the edges translate them.
    """
    try:
        yield
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise QueueRefused(f"the queue server refuses us: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise QueueUnreachable(f"the queue server does not answer: {error}") from error


def ping(client: redis.Redis) -> None:
    """Check that the queue server answers. Raises QueueUnreachable or QueueRefused."""
    with translated():
        client.ping()
