"""A whole system on one machine: queue, wire, head and tail as processes of their own, an ocean between them.

Jobs go the real way: published to the queue, fetched by the head's fronts, their outcomes read from the results stream.
Head and tail reach the two servers over simulated links, so that one is `rtt_ms` from the other.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import redis

from benchmarks.gpu.batch import BatchResult
from benchmarks.gpu.profiler import Busy, signs_of
from benchmarks.gpu.progress import say
from benchmarks.link_simulator import LinkProcess, LinkShape, link_simulator_process
from cli.processes import Processes
from relay.embedded import EmbeddedRedis
from tasks import keys
from tasks.connection import connect
from tasks.generation import GenerationRequest, GenerationTask, Outcome
from tasks.heads import live_heads
from tasks.publish import Publication, Publisher
from tasks.results import decode
from tasks.settings import TaskSettings

#: the served name
NAME = "bench"
#: seconds that head and tail may take to be ready, and a batch to end
START_S = 180.0
BATCH_S = 150.0
#: seconds that a process may take to write down how busy its device was
BUSY_S = 60.0
#: seconds for everything under way to arrive after a change of the links
_SETTLE_S = 0.3
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """What runs. Settings are environment variables without their prefix `SHARDQ_`."""

    both: tuple[tuple[str, str], ...]
    head: tuple[tuple[str, str], ...]
    tail: tuple[tuple[str, str], ...] = ()


@dataclass
class System:
    """A running system."""

    directory: Path
    client: redis.Redis
    url: str
    links: Sequence[LinkProcess]
    processes: Processes
    _numbers: Iterator[int] = field(default_factory=count)
    _seen: bytes = b"0"

    def reshape(self, rtt_ms: float, mbit_s: float | None = None) -> None:
        """Put so much ocean between head and tail. The links to the queue get the delay, not the limit."""
        queue, *wire = self.links
        queue.reshape(LinkShape.leg(rtt_ms))
        for link in wire:
            link.reshape(LinkShape.leg(rtt_ms, mbit_s))
        time.sleep(_SETTLE_S)

    def run(self, requests: Sequence[GenerationRequest]) -> BatchResult:
        """Publish the jobs at once and wait for all. RuntimeError if one fails or it takes too long."""
        batch = next(self._numbers)
        tasks = [
            GenerationTask(f"job{batch}-{number}", 1, "bench", f"c{number}", NAME, request)
            for number, request in enumerate(requests)
        ]
        began = time.perf_counter()
        with Publisher(TaskSettings(broker_url=self.url)) as publisher:
            publisher.publish(Publication(task) for task in tasks)
        outcomes: dict[str, Outcome] = {}
        self._until(lambda: len(self._collect(outcomes)) == len(tasks), BATCH_S, "the batch to end")
        ended = time.perf_counter()
        failed = [outcome.failure_message for outcome in outcomes.values() if outcome.failure is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(tasks)} jobs failed: {failed[0]}")
        return BatchResult(tuple(outcomes[task.task_id] for task in tasks), began, ended)

    def watched(self, work: Callable[[], BatchResult]) -> tuple[BatchResult, Busy, Busy]:
        """A batch, and how busy the head's and the tail's devices were meanwhile."""
        paths = [self.directory / f"{part}.busy" for part in ("head", "tail")]
        for path in paths:
            signs_of(path)[0].touch()
        self._until(lambda: all(signs_of(path)[1].exists() for path in paths), BUSY_S, "the profilers to begin")
        result = work()
        for path in paths:
            signs_of(path)[0].unlink()
        self._until(lambda: all(path.exists() for path in paths), BUSY_S, "the profilers to end")
        head, tail = (Busy(**json.loads(path.read_text(encoding="utf-8"))) for path in paths)
        for path in paths:
            path.unlink()
            signs_of(path)[1].unlink()
        return result, head, tail

    def spans(self, names: frozenset[str], began: float, ended: float) -> list[tuple[float, float]]:
        """Start and end, in seconds, of what the head's trace has under these names between two moments."""
        events: list[dict[str, Any]] = json.loads((self.directory / "trace.json").read_text(encoding="utf-8"))
        spans = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["name"] in names]
        return [span for span in spans if span[0] >= began and span[1] <= ended]

    def await_head(self) -> None:
        """Until the head takes jobs."""
        self._until(lambda: any(head.consuming for head in live_heads(self.client)), START_S, "the head to be ready")

    def _collect(self, outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
        reply: Any = self.client.xread({keys.RESULTS: self._seen}, block=100)
        for entry, fields in reply[0][1] if reply else []:
            self._seen = entry
            content = decode(entry, fields).content
            if isinstance(content, Outcome):
                outcomes[content.task_id] = content
        return outcomes

    def _until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for child in self.processes.ended():
                raise RuntimeError(f"{child.name} ended: {child.tail_of_log()[-600:]}")
            if time.monotonic() > deadline:
                logs = "; ".join(f"{name}: {self.processes[name].tail_of_log()[-300:]}" for name in ("head", "tail"))
                raise RuntimeError(f"waited {timeout_s:g} s for {what}; {logs}")
            time.sleep(_LOOK_S / 10)


@contextmanager
def running(config: SystemConfig, directory: Path) -> Iterator[System]:
    """Start everything; `directory` gets the logs."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        queue = stack.enter_context(EmbeddedRedis(directory / "queue"))
        wire = stack.enter_context(EmbeddedRedis(directory / "wire"))
        queue_leg, head_leg, tail_leg = (
            stack.enter_context(link_simulator_process(server.url, LinkShape())) for server in (queue, wire, wire)
        )
        client = stack.enter_context(closing(connect(TaskSettings(broker_url=queue.url))))
        log = stack.enter_context((directory / "processes.log").open("a", encoding="utf-8", buffering=1))
        processes = Processes(lambda name, line: print(f"{name}: {line}", file=log))
        stack.callback(processes.stop, ("head", "tail"), 15.0)
        addresses = {"head": head_leg.url, "tail": tail_leg.url}
        own = {
            "head": {"broker_url": queue_leg.url, "trace": str(directory / "trace.json"), **dict(config.head)},
            "tail": dict(config.tail),
        }
        for part in ("tail", "head"):
            settings = {"relay_url": addresses[part], "name": NAME, **dict(config.both), **own[part]}
            settings["bench_busy"] = str(directory / f"{part}.busy")
            environment = {f"SHARDQ_{name.upper()}": value for name, value in settings.items()}
            processes.start(part, [sys.executable, "-P", "-m", "benchmarks.gpu.processes", part], environment)
        system = System(directory, client, queue.url, (queue_leg, head_leg, tail_leg), processes)
        began = time.monotonic()
        system.await_head()
        say(f"head and tail are ready after {time.monotonic() - began:.0f} s")
        yield system


class Systems:
    """At most one running system: the one asked for last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._config: SystemConfig | None = None
        self._system: System | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def get(self, config: SystemConfig) -> System:
        """The system with this configuration, started unless it runs; another one is stopped."""
        if self._system is None or not self.runs(config):
            self.close()
            # sections of other processes have made theirs here, too
            directory = Path(tempfile.mkdtemp(prefix="system", dir=self._directory))
            self._system = self._stack.enter_context(running(config, directory))
            self._config = config
        return self._system

    def runs(self, config: SystemConfig) -> bool:
        """Whether a system with this configuration is there already."""
        return self._system is not None and self._config == config

    def close(self) -> None:
        """Stop what runs."""
        self._system = None
        self._stack.close()
