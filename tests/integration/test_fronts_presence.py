"""A head's presence on the queue server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
import redis

from relay.installed import installed_version
from relay.messages import FRAME_VERSION
from relay.profile import Profile
from tasks import heads, keys
from tasks.errors import HeadIdTaken, QueueUnreachable
from tasks.heads import HeadInfo
from workers.head.presence import Identity, Load, Presence

PROFILE = Profile("f1", "float32", "none", "float32", False, 1024)
IDENTITY = Identity("head", "model", PROFILE)


def ignore() -> None:
    pass


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, protocol=2)


def test_a_head_tells_from_its_start_on_what_it_waits_for_and_then_what_it_works_on(client: redis.Redis) -> None:
    heads.say_host(client)
    presence = Presence(client, IDENTITY, ignore, beat_s=0.05)
    try:
        seen(client, lambda info: info.obstacle == "it starts")
        presence.starting("no tail is there")
        info = seen(client, lambda info: info.obstacle == "no tail is there")
        assert (info.head_id, info.model, info.profile, info.slots) == ("head", "model", PROFILE, 0)
        assert (info.version, info.reads, info.frames) == (installed_version(), 1, FRAME_VERSION)
        load = Load((), False, 0, 0.0)
        presence.working(16, lambda: load)
        seen(client, lambda info: info.slots == 16 and info.obstacle is None)
        load = Load(("job.1",), True, 1, 12.5)
        info = seen(client, lambda info: info.live == ("job.1",))
        assert (info.consuming, info.running, info.tokens_per_s) == (True, 1, 12.5)
    finally:
        presence.close()
    assert heads.live_heads(client) == []
    presence.close()


def seen(client: redis.Redis, condition: Callable[[HeadInfo], bool]) -> HeadInfo:
    """What the head tells as soon as it tells that."""
    deadline = time.monotonic() + 10
    while not condition(heads.live_heads(client)[0]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return heads.live_heads(client)[0]


def test_a_second_head_under_the_same_id_is_refused(client: redis.Redis) -> None:
    first = Presence(client, IDENTITY, ignore)
    with pytest.raises(HeadIdTaken):
        Presence(client, IDENTITY, ignore, patience_s=0.0)
    first.close()


def test_a_head_that_stood_still_gives_way_to_the_one_that_has_its_id_now(client: redis.Redis) -> None:
    ended = threading.Event()
    first = Presence(client, IDENTITY, ended.set, beat_s=0.5)
    first.check()
    client.delete(keys.head("head"))  # lapsed
    second = Presence(client, IDENTITY, ignore, beat_s=0.05)
    assert ended.wait(5)
    with pytest.raises(HeadIdTaken, match="another head has taken the id 'head'"):
        first.check()
    first.close()
    assert len(heads.live_heads(client)) == 1
    second.check()
    second.close()
    assert heads.live_heads(client) == []


def test_the_presence_of_a_dead_head_is_waited_out(client: redis.Redis) -> None:
    Presence(client, IDENTITY, ignore, beat_s=1000)  # never beats again
    client.pexpire(keys.head("head"), 500)
    successor = Presence(client, IDENTITY, ignore)
    assert client.pttl(keys.head("head")) > 500  # its own beat, not what was left of the dead one's
    successor.close()
    assert not client.exists(keys.head("head"))


def test_what_an_earlier_process_left_unacknowledged_goes_back_to_the_queue(client: redis.Redis) -> None:
    message = {"body": "x", "headers": {}, "properties": {"priority": 0, "delivery_info": {}}}
    client.hset(keys.unacked("head"), "tag", json.dumps([message, "shardq.model", "shardq.model"]))
    client.zadd(keys.unacked_index("head"), {"tag": time.time()})
    presence = Presence(client, IDENTITY, ignore)
    assert presence.num_restored == 1
    presence.close()
    assert client.llen(keys.queue("model")) == 1
    assert not client.exists(keys.unacked("head"))


def test_no_queue_server_is_an_error_of_its_own() -> None:
    with pytest.raises(QueueUnreachable):
        Presence(redis.Redis(port=1, protocol=2), IDENTITY, ignore)
