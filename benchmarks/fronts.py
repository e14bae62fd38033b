"""How fast jobs get from a far queue server into an engine's slots: `python -m benchmarks.fronts`.

The fronts are real, the engine has no model: it keeps each job in a slot for a fixed time. Measured are the time
from the moment the fronts may consume until every slot is filled, and the rate at which short jobs flow.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.link_simulator import LinkShape, link_simulator_process
from relay.embedded import EmbeddedRedis
from tasks import keys
from tasks.generation import GenerationRequest, GenerationTask
from tasks.publish import Publication, Publisher
from tasks.settings import TaskSettings
from tests.integration.fake_engine import AUTHKEY, HEAD, MODEL, FakeEngine
from workers.head.channel import private_address
from workers.head.fronts import Fronts, concurrency
from workers.settings import HeadSettings


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    rtt_ms: float = 86.0
    fronts: int = 8
    slots: int = 64
    #: the short jobs
    jobs: int = 400
    job_s: float = 0.5


@dataclass(frozen=True)
class Figures:
    """What came out."""

    #: seconds from the permission to consume until every slot held a job
    fill_s: float
    #: short jobs finished per second, from the permission to the last record
    jobs_per_s: float
    #: CPU seconds of all fronts per job, while the short jobs flowed
    cpu_s_per_job: float
    #: resident memory of one front
    front_mb: float


def measure(setup: Setup) -> Figures:
    """One run with a server, a delaying proxy and fronts of its own."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedRedis(Path(directory), persistent=False) as server:
        near = redis.Redis.from_url(server.url, protocol=2)
        with link_simulator_process(server.url, LinkShape(delay_s=setup.rtt_ms / 2000)) as far:
            publish(server.url, setup.slots * 2)
            with head(setup, near, far.url, None) as (engine, _):
                fill_s = fill(engine, setup.slots)
                near.delete(*keys.ready(MODEL))
                engine.server.set_consuming(False)
                engine.release()
                wait(lambda: not near.hlen(keys.unacked(HEAD)))
            near.flushall()
            publish(server.url, setup.jobs)
            with head(setup, near, far.url, setup.job_s) as (engine, fronts):
                before = usage(fronts.pids())
                took_s = flow(engine, near, setup.jobs)
                after = usage(fronts.pids())
    return Figures(
        fill_s=fill_s,
        jobs_per_s=setup.jobs / took_s,
        cpu_s_per_job=(after[0] - before[0]) / setup.jobs,
        front_mb=after[1] / len(fronts.pids() or [0] * setup.fronts),
    )


@contextmanager
def head(setup: Setup, near: redis.Redis, url: str, delay_s: float | None) -> Iterator[tuple[FakeEngine, Fronts]]:
    """An engine and its fronts, connected and paused."""
    with private_address() as address:
        engine = FakeEngine(address, slots=setup.slots, delay_s=delay_s)
        near.set(keys.head(HEAD), "alive")
        settings = HeadSettings(model=MODEL, broker_url=url, head_id=HEAD)
        total = concurrency(setup.slots)
        fronts = Fronts(
            settings, address, AUTHKEY, model=MODEL, count=setup.fronts, concurrency_total=total, grace_s=0.0
        )
        try:
            # a front's consumer loop turns once it listens to Celery's remote control
            wait(lambda: sum(client["psub"] != "0" for client in near.client_list()) == setup.fronts)
            time.sleep(1)
            yield engine, fronts
        finally:
            fronts.close()
            engine.close()


def fill(engine: FakeEngine, slots: int) -> float:
    """Seconds until `slots` jobs hold a slot."""
    began = time.time()
    engine.server.set_consuming(True)
    wait(lambda: len(engine.start_times) >= slots)
    return engine.start_times[slots - 1] - began


def flow(engine: FakeEngine, near: redis.Redis, jobs: int) -> float:
    """Seconds until the outcomes of all jobs are in the results stream."""
    began = time.time()
    engine.server.set_consuming(True)
    wait(lambda: near.xlen(keys.RESULTS) >= 2 * jobs)
    return time.time() - began


def publish(url: str, count: int) -> None:
    """Queue jobs."""
    request = GenerationRequest("a prompt " * 20, None, seed=1)
    tasks = (GenerationTask(f"job-{n}", 0, "batch", f"id-{n}", MODEL, request) for n in range(count))
    with Publisher(TaskSettings(broker_url=url)) as publisher:
        publisher.publish(Publication(task) for task in tasks)


def usage(pids: list[int]) -> tuple[float, float]:
    """CPU seconds and resident megabytes of these processes together (Linux)."""
    ticks, pages = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    cpu_s = sum(int(field[11]) + int(field[12]) for field in fields) / ticks
    return cpu_s, sum(int(field[21]) for field in fields) * pages / 2**20


def wait(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the fronts did not get there")
        time.sleep(0.02)


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description="Measure the way from a far queue server into the slots.")
    parser.add_argument("--rtt-ms", type=float, default=Setup.rtt_ms)
    parser.add_argument("--fronts", type=int, default=Setup.fronts)
    parser.add_argument("--slots", type=int, default=Setup.slots)
    parser.add_argument("--jobs", type=int, default=Setup.jobs)
    setup = Setup(**vars(parser.parse_args()))
    figures = measure(setup)
    print(f"{setup.rtt_ms:g} ms round trip, {setup.fronts} fronts, {setup.slots} slots")
    print(f"all slots filled after   {figures.fill_s:6.2f} s")
    print(f"{setup.job_s:g} s jobs                {figures.jobs_per_s:6.1f} /s")
    print(f"CPU of the fronts per job {1000 * figures.cpu_s_per_job:5.1f} ms")
    print(f"memory of one front      {figures.front_mb:6.0f} MB")


if __name__ == "__main__":
    main()
