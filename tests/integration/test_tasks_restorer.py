"""What heads and fronts that are gone had taken goes back to the queue; what is held stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import heads, keys, lease, queues
from tasks.app import VISIBILITY_TIMEOUT_S
from tasks.generation import GenerationRequest, GenerationTask
from tasks.lease import LeaseState
from tasks.publish import Publication
from tasks.restorer import Restorer
from tests.bookkeeping import MODEL, Office, head_info, open_office


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path) as opened:
        yield opened


class Watch:
    """A restorer that looks once a second of a steady clock, while living heads beat."""

    def __init__(self, office: Office, *alive: str) -> None:
        self.office = office
        self.alive = set(alive)
        self.restorer = Restorer(office.client)
        self.now = 50.0

    def look(self, seconds: int = 1) -> int:
        restored = 0
        for _ in range(seconds):
            self.now += 1
            for head in self.alive:
                heads.beat(self.office.client, dataclasses.replace(head_info(head), beat=int(self.now)))
            restored += self.restorer.turn(self.now)
        return restored


def take(office: Office, head_id: str | None, *names: str) -> None:
    """A head takes these jobs, and an engine of it gets them."""
    tasks = [GenerationTask(name, 1, "b", name, MODEL, GenerationRequest("Hi", None, 7)) for name in names]
    office.publisher.publish(Publication(task) for task in tasks)
    for name in names:
        raw: Any = office.client.rpop(keys.queue(MODEL))
        tag = json.loads(raw)["properties"]["delivery_tag"]
        office.client.hset(keys.unacked(head_id), tag, json.dumps([json.loads(raw), "", keys.queue(MODEL)]))
        office.client.zadd(keys.unacked_index(head_id), {tag: 1.0})
        if head_id is not None:
            lease.acquire(office.client, f"{name}.1", head_id, f"{head_id}-1")


def claims(office: Office, head_id: str) -> list[bytes]:
    tags: Any = office.client.zrange(keys.unacked_index(head_id), 0, -1)
    return list(tags)


def renew(office: Office, head_id: str) -> None:
    for tag in claims(office, head_id):
        office.client.zincrby(keys.unacked_index(head_id), 1, tag)


def test_a_dead_heads_jobs_are_free_for_others_within_seconds(office: Office) -> None:
    watch = Watch(office, "alive", "dead")
    take(office, "alive", "a")
    take(office, "dead", "b", "c")
    assert watch.look(2) == 0
    watch.alive.remove("dead")
    heads.withdraw(office.client, "dead")
    renew(office, "alive")
    assert watch.look(2) == 0
    assert watch.look(3) == 2
    assert set(queues.waiting_ids(office.client, MODEL)) == {"b.1", "c.1"}
    assert heads.known_heads(office.client) == {"alive"}
    assert lease.acquire(office.client, "b.1", "alive", "alive-1").state is LeaseState.HELD


def test_a_missed_beat_is_no_death(office: Office) -> None:
    watch = Watch(office, "h1")
    take(office, "h1", "a")
    watch.look(2)
    heads.withdraw(office.client, "h1")  # as when the server's clock jumps ahead
    watch.alive.clear()
    watch.look(2)
    watch.alive.add("h1")
    assert watch.look(5) == 0
    assert office.client.hlen(keys.unacked("h1")) == 1


def test_a_presence_that_never_lapses_because_the_servers_clock_went_back_is_seen_through(office: Office) -> None:
    watch = Watch(office, "h1")
    take(office, "h1", "a")
    watch.look(1)
    watch.alive.clear()
    office.client.persist(keys.head("h1"))
    assert watch.look(12) == 1
    assert lease.acquire(office.client, "a.1", "h2", "h2-1").state is LeaseState.HELD


def test_what_a_dead_front_of_a_living_head_held_goes_back_and_the_engine_keeps_its_lease(office: Office) -> None:
    watch = Watch(office, "h1")
    take(office, "h1", "held", "lost")
    kept, lost = claims(office, "h1")
    ids = {
        tag: queues.task_id(json.loads(office.client.hget(keys.unacked("h1"), tag) or b"")[0]) for tag in (kept, lost)
    }
    restored = 0
    for _ in range(12):
        office.client.zincrby(keys.unacked_index("h1"), 1, kept)
        restored += watch.look()
    assert restored == 1
    assert list(queues.waiting_ids(office.client, MODEL)) == [ids[lost]]
    assert lease.acquire(office.client, ids[lost], "h2", "h2-1").state is LeaseState.TAKEN


def test_nobody_counts_as_dead_for_the_time_in_which_nobody_looked(office: Office) -> None:
    watch = Watch(office, "h1")
    take(office, "h1", "a")
    watch.look(2)
    watch.now += 3600
    assert watch.look(2) == 0


def test_after_an_outage_of_the_server_everybody_gets_time_to_show_up(office: Office) -> None:
    watch = Watch(office, "h1")
    take(office, "h1", "a")
    watch.look(9)
    office.server.stop()
    with pytest.raises(Exception, match=r"refused|closed"):
        watch.restorer.turn(watch.now + 1)
    office.server.start()
    office.client = type(office.client).from_url(office.server.url, protocol=2)
    again = Watch(office, "h1")
    again.restorer = watch.restorer
    watch.restorer._client = office.client
    take(office, "h1", "a")
    assert again.look(9) == 0
    assert again.look(3) == 1


def test_what_a_worker_that_is_no_head_took_is_given_back_when_overdue(office: Office) -> None:
    watch = Watch(office)
    take(office, None, "a")
    assert watch.look(VISIBILITY_TIMEOUT_S - 2) == 0
    assert watch.look(4) == 1
    assert queues.num_waiting(office.client, MODEL) == 1
