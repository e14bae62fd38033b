"""What only the relay over a real server shows: outages, lapses, rights, and that sending does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from benchmarks.link_simulator import LinkShape, LinkSimulator
from relay import acl, keys
from relay.codec import encode
from relay.embedded import EmbeddedRedis
from relay.errors import LinkLost, RelayRefused, RelayUnreachable
from relay.messages import Hello, Round
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import HeadLink, TailLink
from tests.integration.test_relay_contract import QUICK, Linked, link, loses
from tests.redis_server import running_redis
from tests.relay_messages import PROFILE, hello_for, round_of, tail_info, verdict_of


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that the test may stop, pause or kill."""
    with running_redis(tmp_path / "server") as server:
        yield server


@pytest.fixture
def relays(redis_url: str) -> Iterator[tuple[RedisRelay, RedisRelay]]:
    """A head's and a tail's."""
    head, tail = RedisRelay(redis_url, settings=QUICK), RedisRelay(redis_url, settings=QUICK)
    yield head, tail
    head.close()
    tail.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def numbers(end: TailLink | HeadLink, count: int, timeout_s: float = 10.0) -> list[int]:
    """The numbers of the next `count` rounds, fewer if they do not come in time."""
    found = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        received = end.receive(0.2)
        if received is not None and isinstance(received.message, Round):
            found.append(received.message.number)
    return found


def test_sending_returns_at_once_while_the_server_is_paused(
    relays: tuple[RedisRelay, RedisRelay], client: redis.Redis
) -> None:
    linked = link(*relays)
    client.execute_command("CLIENT", "PAUSE", 1000, "ALL")
    started = time.monotonic()
    for number in range(20):
        linked.head_end.send(0, round_of(number, 200_000))
    assert time.monotonic() - started < 0.3
    assert numbers(linked.tail_end, 20) == list(range(20))
    assert time.monotonic() - started > 0.8


def test_sending_returns_at_once_while_the_server_is_frozen_and_the_loss_is_reported(
    own_server: EmbeddedRedis,
) -> None:
    head, tail = RedisRelay(own_server.url, settings=QUICK), RedisRelay(own_server.url, settings=QUICK)
    linked = link(head, tail)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        for number in range(20):
            linked.head_end.send(0, round_of(number, 1_000_000))
        assert time.monotonic() - started < 0.5
        loses(linked.head_end, within_s=12.0)
        loses(linked.tail_end, within_s=12.0)
        assert not linked.lease.held()
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    head.close()
    tail.close()


def test_a_short_freeze_loses_nothing(own_server: EmbeddedRedis) -> None:
    head, tail = RedisRelay(own_server.url, settings=QUICK), RedisRelay(own_server.url, settings=QUICK)
    linked = link(head, tail)
    os.kill(own_server.pid, signal.SIGSTOP)
    for number in range(10):
        linked.head_end.send(0, round_of(number, 500_000))
    time.sleep(1.0)
    os.kill(own_server.pid, signal.SIGCONT)
    assert numbers(linked.tail_end, 10) == list(range(10))
    head.close()
    tail.close()


def test_broken_connections_lose_and_double_nothing(own_server: EmbeddedRedis) -> None:
    port = urlsplit(own_server.url).port or 0
    with LinkSimulator("127.0.0.1", port, LinkShape(delay_s=0.02)) as proxy:
        url = proxy.url_for(own_server.url)
        head, tail = RedisRelay(url, settings=QUICK), RedisRelay(url, settings=QUICK)
        linked = link(head, tail)
        received: list[int] = []
        for number in range(60):
            linked.head_end.send(0, round_of(number, 20_000))
            if number % 12 == 7:
                proxy.cut()
            if number % 4 == 0:
                time.sleep(0.03)
            received += numbers(linked.tail_end, 1, 0.01)
            # no more in flight than the stream keeps
            while number - len(received) > 20:
                received += numbers(linked.tail_end, 1)
        received += numbers(linked.tail_end, 60 - len(received))
        assert received == list(range(60))
        head.close()
        tail.close()


def test_a_server_that_restarts_without_its_data_loses_the_link_at_once(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        head, tail = RedisRelay(server.url, settings=QUICK), RedisRelay(server.url, settings=QUICK)
        linked = link(head, tail)
        for _ in range(3):
            linked.lease.release()
            lease = head.lease("gpu-a", linked.tail)
            assert lease is not None
            hello = hello_for(lease)
            linked = Linked(linked.tail, lease, hello, head.connect(lease, hello), linked.tail_end)
        assert tail.await_hello(linked.tail.tail, 1, 5.0) == hello
        tail_end = tail.accept(linked.tail.tail, hello)
        server.stop()
        server.start()
        loses(linked.head_end)
        loses(tail_end)
        deadline = time.monotonic() + 5.0
        while (again := head.lease("gpu-a", linked.tail)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert again is not None
        assert again.epoch > hello.epoch
        head.connect(again, hello_for(again))
        assert tail.await_hello(linked.tail.tail, hello.epoch, 5.0) == hello_for(again)
        head.close()
        tail.close()


def test_a_server_that_stays_away_loses_the_link_after_the_patience(own_server: EmbeddedRedis) -> None:
    head, tail = RedisRelay(own_server.url, settings=QUICK), RedisRelay(own_server.url, settings=QUICK)
    linked = link(head, tail)
    own_server.stop()
    started = time.monotonic()
    assert "gave up" in loses(linked.head_end, within_s=8.0)
    assert time.monotonic() - started < QUICK.patience_s + 2.0
    with pytest.raises(RelayUnreachable, match="does not answer"):
        head.tails()
    head.close()
    tail.close()


def test_a_killed_tail_vanishes_within_its_ttl_and_ends_its_lease(redis_url: str) -> None:
    script = f"""
import sys, time
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from tests.relay_messages import tail_info
relay = RedisRelay({redis_url!r}, settings=RelaySettings(ttl_s=1.5, refresh_s=0.2))
keep = relay.announce(tail_info())
print("up", flush=True)
time.sleep(60)
"""
    head = RedisRelay(redis_url, settings=QUICK)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            time.sleep(2.0)
            (info,) = head.tails()
            lease = head.lease("a", info)
            assert lease is not None
            assert lease.held()
        finally:
            process.kill()
    killed = time.monotonic()
    while head.tails() or lease.held():
        assert time.monotonic() - killed < 3.0
        time.sleep(0.05)
    head.close()


def test_a_head_that_died_frees_its_tail_by_the_lapse_of_its_lease(
    relays: tuple[RedisRelay, RedisRelay], client: redis.Redis
) -> None:
    head, tail = relays
    info = tail_info()
    tail.announce(info)
    client.set(keys.lease(info.tail), "dead head", px=1000)
    assert head.lease("a", info) is None
    time.sleep(1.1)
    assert head.lease("a", info) is not None


def test_a_lease_that_was_taken_over_is_not_held(relays: tuple[RedisRelay, RedisRelay], client: redis.Redis) -> None:
    head, tail = relays
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    client.set(keys.lease(info.tail), "someone else", px=60_000)
    time.sleep(0.6)
    assert not lease.held()
    lease.release()
    assert client.get(keys.lease(info.tail)) == "someone else"


def test_everything_left_behind_expires(relays: tuple[RedisRelay, RedisRelay], client: redis.Redis) -> None:
    linked = link(*relays, lanes=2)
    linked.head_end.send(1, round_of(1))
    linked.tail_end.send(1, verdict_of(1))
    assert numbers(linked.tail_end, 1) == [1]
    time.sleep(0.3)
    names = list(client.scan_iter())
    assert len(names) == 8
    assert {name: client.pttl(name) for name in names if client.pttl(name) <= 0} == {}


def test_the_head_renews_the_streams_it_uses(relays: tuple[RedisRelay, RedisRelay], client: redis.Redis) -> None:
    linked = link(*relays)
    key = keys.down(linked.tail.tail, linked.hello.epoch, 0)
    client.expire(key, 5)
    time.sleep(1.5)
    assert client.ttl(key) > 200


def test_a_release_leaves_no_streams(relays: tuple[RedisRelay, RedisRelay], client: redis.Redis) -> None:
    linked = link(*relays, lanes=3)
    linked.head_end.send(0, round_of(1))
    assert numbers(linked.tail_end, 1) == [1]
    linked.head_end.close()
    linked.lease.release()
    linked.tail_end.send(2, verdict_of(1))
    time.sleep(0.5)
    assert not [name for name in client.scan_iter() if name.endswith((":down", "0:up"))]


def test_a_malformed_presence_is_ignored(
    relays: tuple[RedisRelay, RedisRelay], client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    head, tail = relays
    info = tail_info()
    tail.announce(info)
    true = client.get(keys.presence(info.tail))
    assert isinstance(true, str)
    values = [
        *("{}", "[1]", "\xff", "null", "", true[:-9], "[" * 100_000, true + " " * (1 << 17)),
        true.replace('"slots": 8', '"slots": Infinity'),
        true.replace('"epoch": 0', '"epoch": 1e999'),
        true.replace('"epoch": 0', f'"epoch": {2**64}'),
    ]
    for number, value in enumerate(values):
        client.set(keys.presence(f"x-{number:08x}"), value)
    client.set(keys.presence("v-00000000"), true)
    client.rpush(keys.presence("w-00000000"), "a list")
    assert head.tails() == [info]
    assert "v-00000000 claims to be" in caplog.text
    assert head.lease("a", info) is not None


def test_keys_that_are_no_tails_presence_are_ignored_and_harm_no_other_tail(
    relays: tuple[RedisRelay, RedisRelay], client: redis.Redis
) -> None:
    linked = link(*relays)
    true = client.get(keys.presence(linked.tail.tail))
    assert isinstance(true, str)
    for name in (b"*", b"gpu-?-00000000", b"\xff\xfe-00000000", b"a:b-00000000", b"gpu", b""):
        client.set(b"shardq:tail:" + name, true.replace(linked.tail.tail, name.decode(errors="replace")))
    client.set(b"shardq:link:" + linked.tail.tail.encode() + b":\xff:0:up", "x")
    assert relays[0].tails() == [linked.tail]
    linked.head_end.send(0, round_of(1))
    assert numbers(linked.tail_end, 1) == [1]
    linked.lease.release()
    assert relays[0].lease("again", linked.tail) is not None


def test_a_malformed_hello_is_dropped_with_a_reason_and_the_next_epoch_is_heard(
    relays: tuple[RedisRelay, RedisRelay], client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    head, tail = relays
    info = tail_info()
    tail.announce(info)
    hello = Hello("gpu-a", 3, 1, PROFILE, split=2, slots=8, max_query=64)
    frames = [b"", b"nonsense", encode(hello)[:-1], encode(verdict_of(1)), encode(hello), encode(hello) + b"more"]
    for number, frame in enumerate(frames):
        client.xadd(keys.hello(info.tail), {"f": frame}, id=f"{10 + number}-0")
    client.xadd(keys.hello(info.tail), {"another field": "x"}, id="16-0")
    assert tail.await_hello(info.tail, 0, 0.5) is None
    assert sum("hello" in message and "dropped" in message for message in caplog.messages) >= len(frames) + 1
    time.sleep(0.5)  # the presence tells which epochs were seen
    lease = head.lease("gpu-a", info)
    assert lease is not None
    assert lease.epoch > 16
    head.connect(lease, hello_for(lease))
    assert tail.await_hello(info.tail, 0, 5.0) == hello_for(lease)


def test_a_head_and_a_tail_work_with_no_more_than_their_rights(tmp_path: Path) -> None:
    with running_redis(tmp_path, password="admin") as server:
        admin = redis.Redis.from_url(server.url)
        port = urlsplit(server.url).port
        admin.execute_command("ACL", "SETUSER", "tail", "reset", "on", ">t", *acl.for_tail("gpu-b"))
        admin.execute_command("ACL", "SETUSER", "head", "reset", "on", ">h", *acl.for_head())
        admin.execute_command("ACL", "LOG", "RESET")
        head = RedisRelay(f"redis://head:h@127.0.0.1:{port}/0", settings=QUICK)
        tail = RedisRelay(f"redis://tail:t@127.0.0.1:{port}/0", settings=QUICK)
        assert head.ping() < 1.0
        linked = link(head, tail, lanes=2)
        linked.head_end.send(1, round_of(1))
        assert numbers(linked.tail_end, 1) == [1]
        linked.tail_end.send(1, verdict_of(1))
        assert linked.head_end.receive(5.0) is not None
        # long enough for probes and renewals of all kinds
        time.sleep(1.5)
        assert head.tails()[0].tail == linked.tail.tail
        assert linked.lease.held()
        head.close()
        loses(linked.tail_end)
        tail.close()
        assert admin.execute_command("ACL", "LOG") == []
        admin.close()


def test_a_tails_rights_reach_no_other_tail(tmp_path: Path) -> None:
    with running_redis(tmp_path, password="admin") as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("ACL", "SETUSER", "tail", "reset", "on", ">t", *acl.for_tail("gpu-b"))
        port = urlsplit(server.url).port
        tail = RedisRelay(f"redis://tail:t@127.0.0.1:{port}/0", settings=QUICK)
        with pytest.raises(RelayRefused, match="refuses a command"):
            tail.announce(tail_info("gpu-c"))
        with pytest.raises(RelayRefused, match="refuses a command"):
            tail.tails()
        tail.close()


@pytest.mark.parametrize("account", [":wrong@", "nobody:x@", ""])
def test_a_refused_login_is_told_apart_from_an_absent_server(tmp_path: Path, account: str) -> None:
    with running_redis(tmp_path, password="right") as server:
        relay = RedisRelay(f"redis://{account}127.0.0.1:{server.port}/0", settings=QUICK)
        with pytest.raises(RelayRefused, match="refuses the login") as refused:
            relay.tails()
        assert "wrong" not in str(refused.value).replace("WRONGPASS", "")
        with pytest.raises(RelayRefused):
            relay.announce(tail_info())
        relay.close()


def test_a_passwordless_server_elsewhere_is_refused_before_any_connection() -> None:
    with pytest.raises(RelayRefused, match="without a password"):
        RedisRelay("redis://203.0.113.7:6379/0")


def test_over_a_long_link_lanes_overlap_and_a_round_costs_one_trip_each_way(redis_url: str) -> None:
    port = urlsplit(redis_url).port or 0
    delay_s, lanes, rounds = 0.05, 4, 5
    settings = RelaySettings(block_s=1.0)
    with LinkSimulator("127.0.0.1", port, LinkShape(delay_s=delay_s / 2)) as proxy:
        url = proxy.url_for(redis_url)
        head, tail = RedisRelay(url, settings=settings), RedisRelay(url, settings=settings)
        linked = link(head, tail, lanes=lanes)
        started = time.monotonic()
        for lane in range(lanes):
            linked.head_end.send(lane, round_of(1, 20_000))
        left = dict.fromkeys(range(lanes), rounds)
        while any(left.values()):
            if (up := linked.tail_end.receive(0.001)) is not None:
                linked.tail_end.send(up.lane, verdict_of(1))
            if (down := linked.head_end.receive(0.001)) is not None:
                left[down.lane] -= 1
                if left[down.lane]:
                    linked.head_end.send(down.lane, round_of(1, 20_000))
        # each frame crosses the proxy twice: head → server → tail, and back
        assert time.monotonic() - started < rounds * 2 * delay_s * 1.6
        head.close()
        tail.close()


def test_a_link_is_not_opened_when_the_server_is_away(own_server: EmbeddedRedis) -> None:
    head, tail = RedisRelay(own_server.url, settings=QUICK), RedisRelay(own_server.url, settings=QUICK)
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    own_server.stop()
    with pytest.raises(RelayUnreachable):
        head.connect(lease, hello_for(lease))
    with pytest.raises(RelayUnreachable):
        tail.accept(info.tail, hello_for(lease))
    with pytest.raises((RelayUnreachable, LinkLost)):
        tail.await_hello(info.tail, 0, 1.0)
    head.close()
    tail.close()
