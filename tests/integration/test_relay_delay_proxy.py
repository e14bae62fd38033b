"""The delaying proxy of the benchmarks delays; it does not throttle unless asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import redis

from benchmarks.delay_proxy import DelayProxy, delay_proxy_process


@pytest.fixture(params=["thread", "process"])
def far_url(request: pytest.FixtureRequest, redis_url: str) -> Iterator[str]:
    """The server seen at a round trip of 80 ms."""
    if request.param == "process":
        with delay_proxy_process(redis_url, delay_s=0.04) as url:
            yield url
        return
    with DelayProxy("127.0.0.1", urlsplit(redis_url).port or 0, delay_s=0.04) as proxy:
        yield proxy.url_for(redis_url)


def test_a_command_takes_the_round_trip_and_little_more(far_url: str) -> None:
    with redis.Redis.from_url(far_url) as client:
        client.ping()
        started = time.monotonic()
        for _ in range(5):
            client.ping()
        assert 0.4 <= time.monotonic() - started < 0.55


def test_many_commands_under_way_take_one_round_trip_together(far_url: str) -> None:
    with redis.Redis.from_url(far_url) as client:
        client.ping()
        started = time.monotonic()
        with client.pipeline(transaction=False) as pipeline:
            for number in range(200):
                pipeline.set(f"key-{number}", b"x" * 10_000)
            pipeline.execute()
        assert 0.08 <= time.monotonic() - started < 0.4


def test_a_limited_rate_makes_large_values_late(redis_url: str) -> None:
    port = urlsplit(redis_url).port or 0
    with (
        DelayProxy("127.0.0.1", port, delay_s=0.01, bytes_per_s=1e6) as proxy,
        redis.Redis.from_url(proxy.url_for(redis_url)) as client,
    ):
        client.ping()
        started = time.monotonic()
        client.set("key", b"x" * 300_000)
        assert 0.3 <= time.monotonic() - started < 0.9


def test_cut_breaks_open_connections_and_new_ones_work(redis_url: str) -> None:
    with DelayProxy("127.0.0.1", urlsplit(redis_url).port or 0, delay_s=0.001) as proxy:
        url = proxy.url_for(redis_url)
        connection = redis.ConnectionPool.from_url(url).make_connection()
        connection.connect()
        proxy.cut()
        time.sleep(0.1)
        with pytest.raises(redis.ConnectionError):
            connection.can_read()
        with redis.Redis.from_url(url) as client:
            assert client.ping()
