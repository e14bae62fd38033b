"""Presence of heads, served names, and what happens to the messages of a dead head."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.installed import installed_version
from tasks import heads, keys, queues
from tasks.app import make_app
from tasks.errors import HeadIdTaken, ModelNameInvalid, ProfileMismatch
from tasks.generation import GenerationRequest, GenerationTask
from tasks.publish import Publication
from tasks.settings import TaskSettings
from tests.bookkeeping import MODEL, PROFILE, Office, head_info, open_office


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path) as opened:
        yield opened


def publish(office: Office, *names: str, priority: int = 0) -> None:
    request = GenerationRequest("Hi", None, 7)
    tasks = [GenerationTask(name, 1, "b", name, MODEL, request) for name in names]
    office.publisher.publish(Publication(task, priority) for task in tasks)


def take(office: Office, head_id: str | None, number: int) -> list[str]:
    """What a head does that dies right after: its task ids stay unacknowledged."""
    app = make_app(TaskSettings(broker_url=office.server.url, head_id=head_id))
    connection: Any = app.connection_for_read()
    channel: Any = connection.channel()
    channel.do_restore = False  # no goodbye
    taken = [channel.basic_get(keys.queue(MODEL)).headers["id"] for _ in range(number)]
    connection.release()
    return taken


def test_a_head_that_beats_is_alive_with_all_it_told(office: Office) -> None:
    info = dataclasses.replace(
        head_info(live=("a.1", "b.1")), version="1.2.3", reads=2, frames=5, obstacle="no tail is there"
    )
    heads.say_host(office.client)
    assert heads.host_version(office.client) == installed_version()
    heads.beat(office.client, info)
    assert heads.live_heads(office.client) == [info]
    assert heads.presences(office.client) == {"h1": info.to_json().encode()}


def test_a_host_that_does_not_say_its_version_is_told_what_the_first_one_could_read(office: Office) -> None:
    info = dataclasses.replace(head_info(), version="1.2.3", reads=2, frames=5, obstacle="no tail is there")
    for tell in (heads.claim, heads.beat):
        tell(office.client, info)
        assert heads.live_heads(office.client) == [head_info()]
    heads.say_host(office.client)
    heads.beat(office.client, info)
    assert heads.live_heads(office.client) == [info]


def test_what_a_later_version_tells_besides_hides_no_head(office: Office) -> None:
    heads.beat(office.client, head_info("a"))
    told = json.loads(head_info("b").to_json())
    office.client.sadd(keys.HEADS, "b")
    office.client.set(keys.head("b"), json.dumps({**told, "later": [1], "figures": None}))
    assert heads.live_heads(office.client) == [head_info("a"), head_info("b")]


def test_a_presence_that_cannot_be_read_hides_no_other_head_and_counts_as_alive(office: Office) -> None:
    heads.beat(office.client, head_info("a"))
    heads.beat(office.client, head_info("b"))
    office.client.set(keys.head("a"), '{"head_id": "a", "new": 1}')
    assert heads.live_heads(office.client) == [head_info("b")]
    assert all(heads.presences(office.client).values())


def test_a_head_stays_alive_on_a_server_without_memory(office: Office) -> None:
    office.client.config_set("maxmemory", 1)
    heads.beat(office.client, head_info())
    assert heads.live_heads(office.client) == [head_info()]
    office.client.config_set("maxmemory", 0)


def test_a_head_that_leaves_is_known_until_it_owns_nothing(office: Office) -> None:
    heads.beat(office.client, head_info())
    assert not heads.forget_head(office.client, "h1")
    heads.withdraw(office.client, "h1")
    assert heads.presences(office.client) == {"h1": None}
    publish(office, "a")
    take(office, "h1", 1)
    assert not heads.forget_head(office.client, "h1")
    heads.restore_unacked(office.client, "h1")
    assert heads.forget_head(office.client, "h1")
    assert heads.known_heads(office.client) == set()


def test_two_heads_cannot_have_the_same_id(office: Office) -> None:
    first = head_info()
    heads.claim(office.client, first)
    heads.claim(office.client, first)
    with pytest.raises(HeadIdTaken, match="'h1'"):
        heads.claim(office.client, dataclasses.replace(first, instance="another"))
    heads.withdraw(office.client, "h1")
    heads.claim(office.client, dataclasses.replace(first, instance="another"))


def test_a_head_whose_id_another_one_has_claimed_does_not_beat_over_it(office: Office) -> None:
    first = head_info()
    second = dataclasses.replace(first, instance="another")
    heads.claim(office.client, first)
    assert heads.beat(office.client, first)
    heads.withdraw(office.client, "h1")
    assert heads.beat(office.client, first)
    heads.withdraw(office.client, "h1")
    heads.claim(office.client, second)
    assert not heads.beat(office.client, first)
    assert heads.live_heads(office.client) == [second]


@pytest.mark.parametrize("value", ["", "alive", "3", "null", "[]", "{}"])
def test_what_is_no_heads_presence_keeps_no_head_from_beating(office: Office, value: str) -> None:
    office.client.set(keys.head("h1"), value)
    assert heads.beat(office.client, head_info())
    assert heads.live_heads(office.client) == [head_info()]


def test_a_served_name_stands_for_one_profile_and_both_sides_are_named(office: Office) -> None:
    heads.register_profile(office.client, MODEL, PROFILE)
    other = dataclasses.replace(PROFILE, dtype="bfloat16")
    with pytest.raises(ProfileMismatch, match="dtype: bfloat16 ≠ float32"):
        heads.register_profile(office.client, MODEL, other)
    assert heads.registered_models(office.client) == {MODEL: PROFILE}
    assert heads.forget_model(office.client, MODEL)
    heads.register_profile(office.client, MODEL, other)
    assert heads.registered_models(office.client) == {MODEL: other}


@pytest.mark.parametrize("name", ["", "a:1", "with space", "-a", "x" * 129])
def test_a_name_that_would_confuse_the_queues_is_refused(office: Office, name: str) -> None:
    with pytest.raises(ModelNameInvalid):
        heads.register_profile(office.client, name, PROFILE)


def test_a_dead_heads_messages_go_back_to_their_own_priority_oldest_first(office: Office) -> None:
    publish(office, "a", "b", "c")
    publish(office, "urgent", priority=0)
    publish(office, "late", priority=5)
    assert take(office, "h1", 2) == ["a.1", "b.1"]
    assert heads.restore_unacked(office.client, "h1") == 2
    assert office.client.exists(keys.unacked("h1"), keys.unacked_index("h1")) == 0
    assert take(office, "h2", 5) == ["a.1", "b.1", "c.1", "urgent.1", "late.1"]
    assert heads.restore_unacked(office.client, "h2") == 5
    assert office.client.llen(keys.ready_at(keys.queue(MODEL), 5)) == 1


def test_restoring_twice_moves_nothing_twice(office: Office) -> None:
    publish(office, "a", "b")
    take(office, "h1", 2)
    assert heads.restore_unacked(office.client, "h1") == 2
    assert heads.restore_unacked(office.client, "h1") == 0
    assert queues.num_waiting(office.client, MODEL) == 2


@pytest.mark.parametrize(
    "stored",
    [
        *(b"", b"\xff", b"[{},}", b"[" * 100_000, b"3", b'[{}, ""]', b'[{}, "", null]', b'["text", "", "q"]'),
        b'[{"properties": {"priority": "high"}}, "", "q"]',
        b'[{"properties": {"priority": [1]}}, "", "q"]',
    ],
)
def test_a_taken_message_that_cannot_be_read_is_put_aside_and_keeps_no_other_back(
    office: Office, stored: bytes
) -> None:
    publish(office, "a", "b")
    take(office, "h1", 2)
    office.client.hset(keys.unacked("h1"), "bad", stored)
    office.client.zadd(keys.unacked_index("h1"), {"bad": 1.0})
    assert {"a.1", "b.1"} <= set(queues.unacked_ids(office.client, "h1"))
    assert heads.restore_unacked(office.client, "h1") == 2
    assert office.client.exists(keys.unacked("h1"), keys.unacked_index("h1")) == 0
    rejected: Any = office.client.xrange(keys.REJECTED)
    assert [fields[b"json"] for _, fields in rejected] == [stored]


def test_a_foreign_message_hides_no_waiting_one(office: Office) -> None:
    office.client.rpush(keys.queue(MODEL), "not json", "[]", "3", '{"headers": []}')
    publish(office, "a")
    assert set(queues.waiting_ids(office.client, MODEL)) == {"", "a.1"}
    assert queues.remove(office.client, MODEL, {"a.1"}) == {"a.1"}


def test_messages_are_taken_out_of_every_priority_by_task_id(office: Office) -> None:
    publish(office, *(f"n{number}" for number in range(1200)))
    publish(office, "late", priority=9)
    gone = {"n0.1", "n499.1", "n500.1", "n1199.1", "late.1", "none.1"}
    assert queues.remove(office.client, MODEL, gone) == gone - {"none.1"}
    left = list(queues.waiting_ids(office.client, MODEL))
    assert len(left) == 1196
    assert not gone.intersection(left)
