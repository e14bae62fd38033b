"""A whole installation of real processes, for tests that submit, kill and look at what came out.

No test may hang on how fast the machine is. Whatever is to be under way while something is done to it runs over a long
link meanwhile (`System.slow`): there a round takes `SLOW_RTT_MS`, however fast or slow the machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import redis

from benchmarks.link_simulator import LinkShape, LinkSimulator
from cli.processes import Child, Processes, child_environment, shardq_argv
from relay.embedded import EmbeddedRedis
from storage.batch_records import Progress
from storage.database import Database
from storage.job_records import JobRow
from storage.jobs import iterate_results, progress
from storage.states import TERMINAL_STATUSES
from tasks.heads import HeadInfo, live_heads
from tests.redis_server import running_redis

#: seconds after which a test gives up waiting for anything
PATIENCE_S = 120.0

#: round trip between head and tail over the long link: a job of 100 tokens takes the better part of a minute
SLOW_RTT_MS = 500.0

#: small and quick: what every worker of a test is started with, unless it says otherwise
BOTH = {"dtype": "float32", "device": "cpu", "max-length": 256}
HEAD = {"slots": 8, "fronts": 2, "drafter": "ngram", "draft-length": 4, "grace-s": 2}
TAIL = {"slots": 8}


class System:
    """A context manager: two Redis servers from the start; the rest is started and ended by the test.

    Everything ends with the context, whatever happened. Lines of all processes are kept in `logs()`.
    """

    def __init__(self, directory: Path, model: Path | str, *, name: str = "tiny") -> None:
        self.directory = directory
        self.model = str(model)
        self.name = name
        self._lines: list[str] = []
        self._num_reported = 0
        self._processes = Processes(self.hear)
        self._cleanup = ExitStack()
        self.queue: EmbeddedRedis
        self.wire: EmbeddedRedis
        self._link: LinkSimulator

    def __enter__(self) -> Self:
        with self._cleanup as stack:
            self.queue = stack.enter_context(running_redis(self.directory / "queue", persistent=True))
            self.wire = stack.enter_context(running_redis(self.directory / "wire"))
            self._link = stack.enter_context(LinkSimulator("127.0.0.1", urlsplit(self.wire.url).port or 0, LinkShape()))
            stack.callback(self._processes.kill)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    @property
    def environment(self) -> dict[str, str]:
        """How every process finds the services of this system and no other."""
        return {
            "SHARDQ_DATA_DIR": str(self.directory),
            "SHARDQ_DATABASE_URL": f"sqlite:///{self.directory / 'shardq.sqlite3'}",
            "SHARDQ_BROKER_URL": self.queue.url,
            "SHARDQ_RELAY_URL": self._link.url_for(self.wire.url),
            # several processes share few cores
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def hear(self, child: str, line: str) -> None:
        """A process wrote a line; called from its reader's thread."""
        self._lines.append(f"{child:>10} | {line}")

    def logs(self) -> str:
        """Everything that all processes wrote, in order."""
        return "\n".join(self._lines)

    def new_logs(self) -> str:
        """As `logs`, since the last call."""
        lines, self._num_reported = self._lines[self._num_reported :], len(self._lines)
        return "\n".join(lines)

    # -- processes --------------------------------------------------------------------------------------------

    def start(self, child: str, *arguments: str, **environment: str) -> Child:
        """Start `shardq <arguments>` under a name of its own."""
        return self._processes.start(child, shardq_argv(*arguments), {**self.environment, **environment})

    def start_bookkeeper(self) -> Child:
        """Start the bookkeeper; it looks for lost jobs more often than in real life."""
        return self.start("bookkeeper", "bookkeeper", SHARDQ_SCAN_INTERVAL_S="3")

    def start_tail(self, child: str = "tail", **options: object) -> Child:
        """Start a tail; `options` as `max_length=128`."""
        return self.start(child, "tail", *_arguments({"model": self.model, **BOTH, **TAIL}, options))

    def start_head(self, child: str = "head", **options: object) -> Child:
        """Start a head; `options` as `draft_length=0`."""
        defaults = {"model": self.model, "name": self.name, "head-id": child, **BOTH, **HEAD}
        return self.start(child, "head", *_arguments(defaults, options))

    def start_all(self) -> None:
        """Start bookkeeper, tail and head, those that do not run, and wait until jobs are taken."""
        for child in self._processes.ended():
            self._processes.forget(child.name)
        starts = {"bookkeeper": self.start_bookkeeper, "tail": self.start_tail, "head": self.start_head}
        for name, start in starts.items():
            if name not in self._processes:
                start()
        self.wait_consuming()

    def pid(self, child: str) -> int:
        """The process id of a child that was started."""
        return self._processes[child].process.pid

    def kill(self, child: str) -> None:
        """kill -9, and wait for the end."""
        process = self._processes[child].process
        process.kill()
        process.wait()
        self._processes.forget(child)

    def kill_tail(self) -> None:
        """kill -9 the tail."""
        self.kill("tail")

    def kill_head(self) -> None:
        """kill -9 the head's engine process; its fronts must notice by themselves."""
        self.kill("head")

    def stop(self, child: str, timeout_s: float = 30.0, *, number: signal.Signals = signal.SIGTERM) -> int:
        """A signal, and the exit status."""
        process = self._processes[child].process
        process.send_signal(number)
        status = process.wait(timeout_s)
        self._processes.forget(child)
        return status

    def wait_ended(self, child: str, timeout_s: float = PATIENCE_S) -> int:
        """The exit status of a process that ends by itself."""
        running = self._processes[child]
        status = running.process.wait(timeout_s)
        running.reader.join(timeout=5)
        return status

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A long link between head and tail, until the block ends."""
        self._link.reshape(LinkShape.leg(SLOW_RTT_MS))
        try:
            yield
        finally:
            self._link.reshape(LinkShape())

    # -- waiting ----------------------------------------------------------------------------------------------

    def heads(self) -> list[HeadInfo]:
        """The heads that are alive."""
        with redis.Redis.from_url(self.queue.url) as client:
            return live_heads(client)

    def wait_consuming(self, count: int = 1) -> None:
        """Wait until so many heads take jobs."""
        self.wait_until(lambda: sum(head.consuming for head in self.heads()) >= count, "a head that takes jobs")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Look ten times a second; fails with what was awaited."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
            time.sleep(0.1)

    # -- batches ----------------------------------------------------------------------------------------------

    def shardq(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in a process of its own."""
        return subprocess.run(
            shardq_argv(*arguments),
            env=child_environment(self.environment),
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
            check=False,
        )

    def submit(self, requests: Iterable[dict[str, Any]], *options: str) -> str:
        """Submit requests as a file on stdin; the batch's id."""
        lines = "".join(f"{json.dumps(request)}\n" for request in requests)
        result = self.shardq("submit", *options, "-", stdin=lines)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()[0]

    def progress(self, batch: str) -> Progress:
        """Where a batch stands."""
        with Database.open(self.environment["SHARDQ_DATABASE_URL"]) as database:
            return progress(database, batch)

    def wait_for(self, batch: str, *, completed: int | None = None, timeout_s: float = PATIENCE_S) -> Progress:
        """Wait until so many jobs of a batch have completed, or until it has ended."""

        def reached() -> bool:
            report = self.progress(batch)
            if completed is not None and report.counts.completed >= completed:
                return True
            return report.status in TERMINAL_STATUSES

        goal = f"{completed} completed jobs" if completed is not None else "end"
        self.wait_until(reached, f"{goal} of {batch}", timeout_s)
        return self.progress(batch)

    def jobs(self, batch: str) -> list[JobRow]:
        """The batch's jobs in input order."""
        with Database.open(self.environment["SHARDQ_DATABASE_URL"]) as database:
            return list(iterate_results(database, batch))

    def texts(self, batch: str) -> dict[str, str | None]:
        """Text by custom_id."""
        return {job.custom_id: job.text for job in self.jobs(batch)}


def _arguments(defaults: dict[str, Any], options: dict[str, object]) -> list[str]:
    """Options by name as arguments; None leaves one out, True is a switch."""
    chosen = {**defaults, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [
        part
        for name, value in chosen.items()
        if value is not None
        for part in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
