"""A database and a queue server with some jobs, for the tests of `tasks`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from relay.embedded import EmbeddedRedis
from relay.profile import Profile
from storage.batch_records import NewBatch
from storage.batches import add_jobs, begin_submission, publish_batch
from storage.database import Database
from storage.job_records import NewJob
from tasks.bookkeeper import Bookkeeper
from tasks.connection import connect
from tasks.generation import FinishReason, GenerationRequest, Metrics, Outcome
from tasks.heads import HeadInfo, register_profile
from tasks.publish import Publisher
from tasks.settings import BookkeeperSettings

MODEL = "tiny"
PROFILE = Profile("f00d", "float32", "none", "float32", False, 256)


@dataclass(slots=True)
class Clock:
    """A steady clock that moves only when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Office:
    """Everything a bookkeeper works with."""

    server: EmbeddedRedis
    directory: Path
    client: redis.Redis
    database: Database
    settings: BookkeeperSettings
    publisher: Publisher
    clock: Clock = field(default_factory=Clock)

    def bookkeeper(self) -> Bookkeeper:
        return Bookkeeper(self.settings, self.database, self.client, self.publisher, self.clock)

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.directory / 'jobs.sqlite3'}"


@contextmanager
def open_office(directory: Path, *, persistent: bool = False, **settings: Any) -> Iterator[Office]:
    """A fresh server and database with one served name; ends with the block."""
    with EmbeddedRedis(directory / "redis", persistent=persistent) as server:
        chosen = BookkeeperSettings(broker_url=server.url, **settings)
        client = connect(chosen)
        register_profile(client, MODEL, PROFILE)
        with (
            Database.open(f"sqlite:///{directory / 'jobs.sqlite3'}") as database,
            Publisher(chosen) as publisher,
        ):
            yield Office(server, directory, client, database, chosen, publisher)
        client.close()


def submit(
    database: Database, number: int, *, model: str = MODEL, priority: int = 0, prompt: str = "Hi", **parameters: Any
) -> str:
    """Write and publish a batch of `number` jobs; its id."""
    request = GenerationRequest(prompt=prompt, messages=None, seed=7, **parameters)
    text = json.dumps(request.to_json())
    submission = begin_submission(database, NewBatch(file_hash="0", priority=priority))
    lines = range(1, number + 1)
    add_jobs(database, submission, [NewJob(n, f"c{n}", model, "/v1/completions", text) for n in lines])
    return publish_batch(database, submission).id


def outcome(job: str, attempt: int = 1, text: str = "there", head: str = "h1") -> Outcome:
    """A completed generation."""
    figures = Metrics(1.0, 2.0, 0.1, 5.0, 1, 2.0, 4, 1, 0, 10, 20, 0.1, 0.2, 0.3, 0.4)
    return Outcome(job, attempt, head, text, (1, 2, 3), FinishReason.STOP, 4, None, None, figures)


def head_info(head_id: str = "h1", *, slots: int = 4, live: tuple[str, ...] = ()) -> HeadInfo:
    """A head that serves `MODEL`."""
    return HeadInfo(head_id, f"{head_id}-1", MODEL, PROFILE, slots, live, True, len(live), 12.5, 99.0)


@contextmanager
def at_work(office: Office) -> Iterator[Bookkeeper]:
    """A bookkeeper in a thread, with a clock that runs."""
    bookkeeper, stop = office.bookkeeper(), threading.Event()
    bookkeeper._clock = time.monotonic
    thread = threading.Thread(target=bookkeeper.run, args=(stop,))
    thread.start()
    try:
        yield bookkeeper
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
