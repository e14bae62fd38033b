"""How the queue server's client lives through connections that are dead and do not say so."""

from __future__ import annotations

import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import redis

from benchmarks.link_simulator import LinkShape, LinkSimulator
from tasks import connection
from tasks.settings import TaskSettings

TIMEOUT_S = 1.0


def test_a_half_open_link_costs_one_timeout_however_many_connections_are_idle(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", TIMEOUT_S)
    with (
        LinkSimulator("127.0.0.1", urlsplit(redis_url).port or 0, LinkShape()) as link,
        closing(connection.connect(TaskSettings(broker_url=link.url_for(redis_url)))) as client,
    ):
        pool = client.connection_pool
        for held in [pool.get_connection() for _ in range(6)]:
            pool.release(held)
        link.swallow(0.1)
        time.sleep(0.2)
        with pytest.raises(redis.TimeoutError):
            client.ping()
        began = time.monotonic()
        for held in [pool.get_connection() for _ in range(6)]:
            held.send_command("PING")
            assert held.read_response() in (b"PONG", "PONG")
            pool.release(held)
        assert time.monotonic() - began < TIMEOUT_S
