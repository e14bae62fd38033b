"""What integration tests share: a real server per session, empty at the start of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from relay.embedded import EmbeddedRedis
from tests.redis_server import running_redis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server without password or persistence, shared by the session."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty server."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url
