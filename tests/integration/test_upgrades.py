"""From what earlier versions left behind: host first, then heads, and back.

`scripts/record_state.py` made `states/`, with real processes of these versions; a version that changes a form adds its
own state there, before it changes it, and all tests hold for that one, too.
"""

from __future__ import annotations

import base64
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from relay import codec
from relay.errors import FrameInvalid
from relay.messages import FIRST_TOLD_FRAMES, FRAME_VERSION
from relay.presence import Presence
from relay.profile import Profile
from relay.streams import RedisRelay
from relay.tail_figures import TailFigures
from relay.transport import TailInfo
from storage.batches import get_batch
from storage.database import Database
from storage.job_records import JobRow
from storage.jobs import iterate_results
from storage.migrations import FIRST_VERSION, UPGRADES
from storage.states import BatchStatus, JobState
from tasks import generation, heads, keys, results
from tasks.connection import connect
from tasks.figures import HeadFigures
from tasks.generation import Choice, GenerationRequest, GenerationTask, Metrics, Outcome
from tasks.heads import HeadInfo
from tasks.logprobs import TokenLogprob
from tasks.publish import Publisher
from tasks.settings import BookkeeperSettings
from tests.bookkeeping import Office, at_work, submit
from tests.integration.test_fronts import wait_until
from tests.integration.test_fronts_recovery import full_head
from tests.redis_server import running_redis

MODEL = "tiny"
HEAD = "gpu-a"
PROFILE = Profile("f", "float32", "none", "float32", False, 256)


@dataclass(frozen=True)
class State:
    """What one earlier version left behind."""

    directory: Path

    def read(self, name: str) -> Any:
        return json.loads((self.directory / f"{name}.json").read_text(encoding="utf-8"))

    @property
    def sql(self) -> str:
        return (self.directory / "database.sql").read_text(encoding="utf-8")

    def fields(self, kind: type) -> set[str]:
        return set(self.read("fields")[kind.__name__])

    def write_database(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(self.sql)

    def restore(self, client: redis.Redis, name: str) -> None:
        """Put the keys of a server back; presences and leases for as long as they stand without their owners."""
        for key, item in self.read(name).items():
            put_back(client, key, item["type"], item["value"])
            if key.startswith(("shardq:head:", "shardq:tail:", keys.BOOKKEEPER)):
                client.pexpire(key, 2000)


def put_back(client: redis.Redis, key: str, kind: str, value: Any) -> None:
    """One key as `scripts/record_state.py` wrote it down."""
    match kind:
        case "string":
            client.set(key, value)
        case "list":
            client.rpush(key, *value)
        case "hash":
            client.hset(key, mapping=value)
        case "set":
            client.sadd(key, *value)
        case "zset":
            client.zadd(key, dict(value))
        case "stream":
            for entry, content in value:
                client.xadd(key, {name: as_bytes(item) for name, item in content.items()}, id=entry)


def as_bytes(value: Any) -> bytes:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else str(value).encode()


@pytest.fixture(params=sorted((Path(__file__).parent / "states").iterdir()), ids=lambda path: path.name)
def state(request: pytest.FixtureRequest) -> State:
    return State(request.param)


@pytest.fixture
def office(state: State, tmp_path: Path) -> Iterator[Office]:
    """A host of this version on the database and the queue of the earlier one."""
    state.write_database(tmp_path / "jobs.sqlite3")
    with running_redis(tmp_path / "redis") as server:
        settings = BookkeeperSettings(broker_url=server.url)
        with closing(connect(settings)) as client, Publisher(settings) as publisher:
            state.restore(client, "queue")
            with Database.open(f"sqlite:///{tmp_path / 'jobs.sqlite3'}") as database:
                yield Office(server, tmp_path, client, database, settings, publisher)


def jobs_of(office: Office, batch: str) -> list[JobRow]:
    return list(iterate_results(office.database, get_batch(office.database, batch).id))


def ends(office: Office, batch: str) -> Counter[JobState]:
    return Counter(row.state for row in jobs_of(office, batch))


# -- the database ---------------------------------------------------------------------------------------------


def test_the_database_keeps_every_value_that_it_had(state: State, tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    state.write_database(path)
    with closing(sqlite3.connect(path)) as connection:
        before = {name: rows(connection, name, columns(connection, name)) for name in tables(connection)}
        known = {name: columns(connection, name) for name in before}
    Database.open(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection:
        for name in before.keys() - {"schema_version"}:
            assert rows(connection, name, known[name]) == before[name], name


def tables(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def rows(connection: sqlite3.Connection, table: str, names: list[str]) -> list[Any]:
    return connection.execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY 1").fetchall()


def test_the_copy_that_an_upgrade_leaves_is_what_the_earlier_version_had(state: State, tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    state.write_database(path)
    Database.open(f"sqlite:///{path}").close()
    copies = list(tmp_path.glob("jobs.sqlite3.v*.bak"))
    if f"schema_{FIRST_VERSION + len(UPGRADES)}" == state.directory.name:
        assert not copies  # nothing was changed: the earlier version opens the database itself
        return
    (copy,) = copies
    with closing(sqlite3.connect(copy)) as connection:
        assert "".join(f"{statement}\n" for statement in connection.iterdump()) == state.sql


# -- host first -----------------------------------------------------------------------------------------------


def test_everything_that_was_under_way_ends_as_it_should(office: Office) -> None:
    told = {record.task_id: record for record in recorded(office) if isinstance(record, Outcome)}
    assert told
    with at_work(office), full_head(office, HEAD):
        ended = (BatchStatus.COMPLETED,) * 2
        wait_until(lambda: tuple(get_batch(office.database, name).status for name in ("open", "waiting")) == ended, 90)
    assert ends(office, "open") == {JobState.COMPLETED: 13, JobState.CANCELLED: 1}
    assert ends(office, "waiting") == {JobState.COMPLETED: 9}
    assert ends(office, "done") == {JobState.COMPLETED: 3, JobState.FAILED: 1}
    stored = {f"{row.id}.{row.attempt}": row for row in jobs_of(office, "open")}
    for task_id, outcome in told.items():
        assert (stored[task_id].text, stored[task_id].token_ids) == (outcome.text, outcome.token_ids)
    assert not office.client.exists(keys.REJECTED)


def recorded(office: Office) -> list[Any]:
    entries: Any = office.client.xrange(keys.RESULTS)
    return [results.decode(entry, content).content for entry, content in entries]


def test_the_earlier_head_is_seen_as_one_that_reads_the_first_version_of_the_tasks(office: Office) -> None:
    (head,) = heads.live_heads(office.client)
    assert (head.head_id, head.slots, head.reads, head.frames) == (HEAD, 2, 1, FIRST_TOLD_FRAMES)
    assert (head.obstacle, head.version) == (None, "")
    assert heads.registered_models(office.client) == {MODEL: head.profile}
    heads.register_profile(office.client, MODEL, head.profile)


def test_the_earlier_head_is_given_nothing_that_it_cannot_read(
    office: Office, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generation.SINCE, "min_tokens", 2)
    (head,) = heads.live_heads(office.client)
    office.client.persist(keys.head(HEAD))
    assert heads.beat(office.client, head)
    later, usual = submit(office.database, 3, min_tokens=1), submit(office.database, 3)
    office.bookkeeper()._feeder.turn()
    # the lists that it takes from, as it named them
    names = [f"shardq.{MODEL}", *(f"shardq.{MODEL}:{priority}" for priority in range(1, 10))]
    tasks = [task_in(message) for name in names for message in office.client.lrange(name, 0, -1)]  # type: ignore[union-attr]
    assert Counter(task["batch"] for task in tasks)[usual] == 3
    assert later not in {task["batch"] for task in tasks}
    for task in tasks:
        assert task.keys() == state.fields(GenerationTask)
        assert task["request"].keys() <= state.fields(GenerationRequest)
    assert ends(office, later) == {JobState.QUEUED: 3}


def task_in(message: bytes) -> dict[str, Any]:
    ((task,), _, _) = json.loads(base64.b64decode(json.loads(message)["body"]))
    assert isinstance(task, dict)
    return task


def test_every_parameter_that_the_earlier_head_does_not_know_has_a_later_version(state: State) -> None:
    new = {field.name for field in fields(GenerationRequest)} - state.fields(GenerationRequest)
    assert new <= generation.SINCE.keys(), "give it the next version: tasks.generation.SINCE"
    assert all(generation.SINCE[name] > 1 for name in new)
    assert {field.name for field in fields(GenerationTask)} == state.fields(GenerationTask)


# -- heads before their host, and back ------------------------------------------------------------------------


def test_the_earlier_host_can_read_all_that_a_head_tells_it(state: State) -> None:
    told = json.loads(
        HeadInfo(HEAD, "i", MODEL, PROFILE, 2, (), True, 0, 0.0, 1.0, obstacle="x").to_json(first_form=True)
    )
    assert told.keys() <= state.fields(HeadInfo)
    for kind in (HeadFigures, TailFigures, Profile):
        assert {field.name for field in fields(kind)} <= state.fields(kind), kind


def test_the_earlier_host_can_read_the_outcome_of_its_tasks(state: State) -> None:
    for kind in (Outcome, Metrics, Choice, TokenLogprob):
        assert {field.name for field in fields(kind)} <= state.fields(kind), kind


@contextmanager
def earlier_account(office: Office, state: State, role: str, name: str) -> Iterator[Office]:
    """The queue as an account sees it whose rights the earlier version wrote."""
    rules = [*("resetchannels", "-@all"), *state.read("rules")[role]]
    office.client.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *rules)
    url = office.server.url.replace("redis://", f"redis://{name}:secret@")
    settings = BookkeeperSettings(broker_url=url)
    with closing(connect(settings)) as client:
        yield replace(office, client=client, server=SimpleNamespace(url=url), settings=settings)


def test_a_head_works_with_the_rights_of_the_earlier_version(
    office: Office, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generation.SINCE, "min_tokens", 2)
    heads.say_host(office.client)
    with at_work(office), earlier_account(office, state, "head", HEAD) as account:
        reads = heads.readable_version(account.client, MODEL)
        assert reads == 1
        office.client.acl_log_reset()
        with full_head(account, HEAD, reads=reads):
            wait_until(lambda: get_batch(office.database, "open").status == BatchStatus.COMPLETED, 90)
    assert ends(office, "open")[JobState.FAILED] == 0
    assert not office.client.acl_log()


# -- head and tail --------------------------------------------------------------------------------------------


@pytest.fixture
def wire(state: State, redis_url: str) -> redis.Redis:
    client = redis.Redis.from_url(redis_url)
    state.restore(client, "wire")
    return client


def test_the_earlier_tail_is_seen_with_the_version_of_its_frames(wire: redis.Redis, redis_url: str) -> None:
    with closing(RedisRelay(redis_url)) as relay:
        (tail,) = relay.tails()
        assert (tail.split, tail.slots, tail.frames) == (2, 8, FIRST_TOLD_FRAMES)
        assert relay.split_of(tail.profile) == 2


def test_the_earlier_head_can_read_the_presence_of_a_tail_with_its_frames(state: State) -> None:
    told = json.loads(Presence(TailInfo("t-00000000", PROFILE, 2, 8, 512, 0.0, frames=FIRST_TOLD_FRAMES), 1).to_json())
    assert told.keys() <= {*state.fields(TailInfo), "epoch"}


def test_its_frames_are_read_as_they_were_written_or_named_with_both_versions(state: State) -> None:
    streams = [item["value"] for name, item in state.read("wire").items() if item["type"] == "stream"]
    frames = [as_bytes(content["f"]) for entries in streams for _, content in entries if content["f"]]
    assert len(frames) > 5
    for frame in frames:
        if frame[0] == FRAME_VERSION:
            assert codec.encode(codec.decode(frame)) == frame
        else:
            with pytest.raises(FrameInvalid, match=f"frame version {frame[0]}, expected {FRAME_VERSION}"):
                codec.decode(frame)
