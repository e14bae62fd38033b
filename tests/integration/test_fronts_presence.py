"""A head's presence on the queue server."""

from __future__ import annotations

import json
import threading
import time

import pytest
import redis

from relay.profile import Profile
from tasks import heads, keys
from tasks.errors import HeadIdTaken, ProfileMismatch, QueueUnreachable
from workers.head.presence import Identity, Load, Presence

PROFILE = Profile("f1", "float32", "none", "float32", False, 1024)
IDENTITY = Identity("head", "model", PROFILE, 16)


def idle() -> Load:
    return Load((), False, 0, 0.0)


def ignore() -> None:
    pass


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, protocol=2)


def test_a_head_tells_what_it_works_on_again_and_again(client: redis.Redis) -> None:
    load = idle()
    presence = Presence(client, IDENTITY, lambda: load, ignore, beat_s=0.05)
    try:
        (info,) = heads.live_heads(client)
        assert (info.head_id, info.model, info.profile, info.slots) == ("head", "model", PROFILE, 16)
        load = Load(("job.1",), True, 1, 12.5)
        deadline = time.monotonic() + 5
        while heads.live_heads(client)[0].live != ("job.1",):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (info,) = heads.live_heads(client)
        assert (info.consuming, info.running, info.tokens_per_s) == (True, 1, 12.5)
    finally:
        presence.close()
    assert heads.live_heads(client) == []
    presence.close()


def test_its_profile_is_registered(client: redis.Redis) -> None:
    Presence(client, IDENTITY, idle, ignore).close()
    assert heads.registered_models(client) == {"model": PROFILE}


def test_another_profile_under_the_same_name_is_refused_and_leaves_no_presence(client: redis.Redis) -> None:
    Presence(client, IDENTITY, idle, ignore).close()
    other = Profile("f2", "float32", "none", "float32", False, 1024)
    with pytest.raises(ProfileMismatch, match="f2"):
        Presence(client, Identity("other", "model", other, 16), idle, ignore)
    assert heads.live_heads(client) == []


def test_a_second_head_under_the_same_id_is_refused(client: redis.Redis) -> None:
    first = Presence(client, IDENTITY, idle, ignore)
    with pytest.raises(HeadIdTaken):
        Presence(client, IDENTITY, idle, ignore, patience_s=0.0)
    first.close()


def test_a_head_that_stood_still_gives_way_to_the_one_that_has_its_id_now(client: redis.Redis) -> None:
    ended = threading.Event()
    first = Presence(client, IDENTITY, idle, ended.set, beat_s=0.5)
    first.check()
    client.delete(keys.head("head"))  # lapsed
    second = Presence(client, IDENTITY, idle, ignore, beat_s=0.05)
    assert ended.wait(5)
    with pytest.raises(HeadIdTaken, match="another head has taken the id 'head'"):
        first.check()
    first.close()
    assert len(heads.live_heads(client)) == 1
    second.check()
    second.close()
    assert heads.live_heads(client) == []


def test_the_presence_of_a_dead_head_is_waited_out(client: redis.Redis) -> None:
    Presence(client, IDENTITY, idle, ignore, beat_s=1000)  # never beats again
    client.pexpire(keys.head("head"), 500)
    successor = Presence(client, IDENTITY, idle, ignore)
    assert client.pttl(keys.head("head")) > 500  # its own beat, not what was left of the dead one's
    successor.close()
    assert not client.exists(keys.head("head"))


def test_what_an_earlier_process_left_unacknowledged_goes_back_to_the_queue(client: redis.Redis) -> None:
    message = {"body": "x", "headers": {}, "properties": {"priority": 0, "delivery_info": {}}}
    client.hset(keys.unacked("head"), "tag", json.dumps([message, "shardq.model", "shardq.model"]))
    client.zadd(keys.unacked_index("head"), {"tag": time.time()})
    presence = Presence(client, IDENTITY, idle, ignore)
    assert presence.num_restored == 1
    presence.close()
    assert client.llen(keys.queue("model")) == 1
    assert not client.exists(keys.unacked("head"))


def test_no_queue_server_is_an_error_of_its_own() -> None:
    with pytest.raises(QueueUnreachable):
        Presence(redis.Redis(port=1, protocol=2), IDENTITY, idle, ignore)
