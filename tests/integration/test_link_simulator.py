"""The link simulator of the benchmarks does to a server's answers what it says, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import redis

from benchmarks.link_simulator import LinkShape, LinkSimulator, link_simulator_process


@contextmanager
def client_over(redis_url: str, shape: LinkShape) -> Iterator[tuple[redis.Redis, LinkSimulator]]:
    """A client with one warm connection at the near end of a link."""
    link = LinkSimulator("127.0.0.1", urlsplit(redis_url).port or 0, shape)
    with link, redis.Redis.from_url(link.url_for(redis_url)) as client:
        client.ping()
        yield client, link


def took(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


@pytest.fixture(params=["thread", "process"])
def far_url(request: pytest.FixtureRequest, redis_url: str) -> Iterator[str]:
    """The server seen at a round trip of 80 ms."""
    shape = LinkShape(delay_s=0.04)
    if request.param == "process":
        with link_simulator_process(redis_url, shape) as process:
            yield process.url
        return
    with LinkSimulator("127.0.0.1", urlsplit(redis_url).port or 0, shape) as link:
        yield link.url_for(redis_url)


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


def test_a_limited_rate_up_makes_large_values_late_and_their_reading_not(redis_url: str) -> None:
    with client_over(redis_url, LinkShape(delay_s=0.01, up_bytes_per_s=1e6)) as (client, _):
        started = time.monotonic()
        client.set("key", b"x" * 300_000)
        assert 0.3 <= time.monotonic() - started < 0.6
        started = time.monotonic()
        client.get("key")
        assert time.monotonic() - started < 0.2


def test_a_limited_rate_down_makes_the_reading_of_large_values_late(redis_url: str) -> None:
    with client_over(redis_url, LinkShape(delay_s=0.01, down_bytes_per_s=1e6)) as (client, _):
        started = time.monotonic()
        client.set("key", b"x" * 300_000)
        assert time.monotonic() - started < 0.2
        started = time.monotonic()
        client.get("key")
        assert 0.3 <= time.monotonic() - started < 0.6


def test_connections_share_the_rate_and_a_small_command_does_not_wait_for_a_large_one(redis_url: str) -> None:
    with (
        client_over(redis_url, LinkShape(up_bytes_per_s=1e6)) as (client, link),
        redis.Redis.from_url(link.url_for(redis_url)) as other,
    ):
        other.ping()
        started = time.monotonic()
        bulk = threading.Thread(target=client.set, args=("key", b"x" * 500_000))
        bulk.start()
        time.sleep(0.05)
        small = time.monotonic()
        other.ping()
        assert time.monotonic() - small < 0.2
        other.set("other", b"x" * 300_000)
        bulk.join()
        assert 0.8 <= time.monotonic() - started < 1.3


def test_jitter_delays_but_keeps_the_order(redis_url: str) -> None:
    with client_over(redis_url, LinkShape(jitter_s=0.04)) as (client, _):
        times = []
        for number in range(20):
            started = time.monotonic()
            client.rpush("list", number)
            times.append(time.monotonic() - started)
        assert max(times) - min(times) > 0.01
        assert 0.4 < sum(times) < 1.6  # two ways of 20 ms on average
        assert client.lrange("list", 0, -1) == [b"%d" % number for number in range(20)]


def test_a_stall_holds_everything_back_and_loses_nothing(redis_url: str) -> None:
    with client_over(redis_url, LinkShape()) as (client, link):
        link.stall(0.3)
        started = time.monotonic()
        assert client.ping()
        assert 0.25 < time.monotonic() - started < 0.6
        started = time.monotonic()
        assert client.ping()
        assert time.monotonic() - started < 0.2


def test_stalls_by_plan_come_again_and_again(redis_url: str) -> None:
    with client_over(redis_url, LinkShape(stall_every_s=0.4, stall_s=0.2)) as (client, _):
        slow, until = 0, time.monotonic() + 2.0
        while (started := time.monotonic()) < until:
            client.ping()
            slow += time.monotonic() - started > 0.1
        assert 3 <= slow <= 6


def test_cut_breaks_open_connections_and_new_ones_work(redis_url: str) -> None:
    with LinkSimulator("127.0.0.1", urlsplit(redis_url).port or 0, LinkShape(delay_s=0.001)) as link:
        url = link.url_for(redis_url)
        connection = redis.ConnectionPool.from_url(url).make_connection()
        connection.connect()
        link.cut()
        time.sleep(0.1)
        with pytest.raises(redis.ConnectionError):
            connection.can_read()
        with redis.Redis.from_url(url) as client:
            assert client.ping()


def test_a_half_open_connection_stays_silent_for_good_and_a_new_one_works_after_the_hole(redis_url: str) -> None:
    with LinkSimulator("127.0.0.1", urlsplit(redis_url).port or 0, LinkShape()) as link:
        url = link.url_for(redis_url)
        pool = redis.ConnectionPool.from_url(url, socket_timeout=0.2)
        connection = pool.make_connection()
        connection.connect()
        link.swallow(0.5)
        time.sleep(0.6)
        connection.send_command("SET", "key", "value")
        with pytest.raises(redis.TimeoutError):
            connection.read_response(timeout=0.2, disconnect_on_error=False)
        with redis.Redis.from_url(url) as client:
            assert client.get("key") is None
        connection.disconnect()


def test_a_connection_made_while_bytes_vanish_is_answered_afterwards(redis_url: str) -> None:
    with LinkSimulator("127.0.0.1", urlsplit(redis_url).port or 0, LinkShape()) as link:
        link.swallow(0.5)
        time.sleep(0.05)
        with redis.Redis.from_url(link.url_for(redis_url)) as client:
            assert 0.3 < took(client.ping) < 1.5


def test_a_link_changes_its_shape_under_open_connections(redis_url: str) -> None:
    shape = LinkShape(up_bytes_per_s=1e6, down_bytes_per_s=2e6)
    with (
        link_simulator_process(redis_url, LinkShape()) as link,
        redis.Redis.from_url(link.url) as client,
    ):
        assert took(lambda: client.set("key", b"x" * 300_000)) < 0.2
        link.reshape(shape)
        time.sleep(0.1)
        assert 0.3 <= took(lambda: client.set("key", b"x" * 300_000)) < 0.6
        assert 0.15 <= took(lambda: client.get("key")) < 0.4
        link.reshape(LinkShape(delay_s=0.05))
        time.sleep(0.1)
        assert 0.1 <= took(lambda: client.set("key", b"x" * 300_000)) < 0.25


def test_two_legs_of_a_quarter_of_the_round_trip_make_the_whole() -> None:
    leg = LinkShape.leg(86.0, mbit_s=50.0)
    assert 4 * leg.delay_s == pytest.approx(0.086)
    assert leg.up_bytes_per_s == leg.down_bytes_per_s == pytest.approx(6.25e6)
