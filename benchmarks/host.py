"""What the public host's processes take: `python -m benchmarks.host --jobs 10000`.

Both Redis servers, the bookkeeper and Flower are real. All jobs stand on the queue server at once, which is more than
the bookkeeper would put there by itself; then a head without a model drains some, while somebody looks at the
dashboard and frames lie on the wire server. Memory is read from /proc: Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.resident import Resident, resident_of, table
from cli.processes import child_environment, shardq_argv
from relay.embedded import EmbeddedRedis
from relay.profile import Profile
from storage.addresses import sqlite_url
from tasks import keys, queues
from tasks.heads import register_profile

MODEL = "host"
PROFILE = Profile("f00d", "float32", "none", "float32", deterministic=False, context=4096)
#: megabytes that all of them may have resident together: a t3.micro has 1 GB
WANTED_MB = 700
#: seconds between two looks at the processes' memory
LOOK_S = 0.25
#: frames that lie on the wire server meanwhile, and their bytes: 16 lanes with a prefill chunk each way
FRAMES, FRAME_BYTES = 32, 1 << 20
#: seconds for which a phase without an end of its own is watched
REST_S = 5.0
#: columns and order of the page that is looked at
_DATATABLE = "tasks/datatable?draw=1&start=0&length=100&order[0][column]=0&columns[0][data]=received&order[0][dir]=desc"


@dataclass(frozen=True)
class Setup:
    """How much of everything."""

    jobs: int = 10_000
    #: jobs that the head finishes
    drain: int = 9_500


class Host:
    """The processes, and the most memory that each of them and all together have taken."""

    def __init__(self, directory: Path, setup: Setup, cleanup: ExitStack) -> None:
        self.queue = cleanup.enter_context(EmbeddedRedis(directory / "queue", persistent=True))
        self.wire = cleanup.enter_context(EmbeddedRedis(directory / "wire", persistent=False))
        self.environment = child_environment(
            {
                "SHARDQ_DATA_DIR": str(directory),
                "SHARDQ_BROKER_URL": self.queue.url,
                "SHARDQ_RELAY_URL": self.wire.url,
                "SHARDQ_DATABASE_URL": sqlite_url(directory / "shardq.sqlite3"),
                # everything at once: more than is ever queued with the defaults
                "SHARDQ_WINDOW_MIN_JOBS": str(setup.jobs),
                "SHARDQ_WINDOW_BYTES": str(1 << 30),
            }
        )
        self.client = redis.Redis.from_url(self.queue.url, protocol=2)
        register_profile(self.client, MODEL, PROFILE)
        self.flower_url = f"http://127.0.0.1:{_free_port()}"
        bookkeeper = self._start(cleanup, "bookkeeper", "--log-level", "warning", "--metrics-port", "0")
        flower = self._start(cleanup, "flower", "--port", self.flower_url.rpartition(":")[2], "--log-level", "error")
        self.pids = {
            "queue Redis": self.queue.pid,
            "wire Redis": self.wire.pid,
            "bookkeeper": bookkeeper.pid,
            "Flower": flower.pid,
        }

    def _start(self, cleanup: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(shardq_argv(*arguments), env=self.environment)
        cleanup.callback(process.wait)
        cleanup.callback(process.terminate)
        return process

    @contextmanager
    def watched(self) -> Iterator[Resident]:
        """The most that was resident within the block."""
        peak, over = Resident(), threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                peak.raise_to({name: resident_of(pid) for name, pid in self.pids.items()})

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield peak
        finally:
            over.set()
            thread.join()

    def num_waiting(self) -> int:
        """Messages that no head has taken."""
        return queues.num_waiting(self.client, MODEL)

    def num_done(self) -> int:
        """Attempts whose outcome was published."""
        return sum(1 for _ in self.client.scan_iter(keys.job("*"), count=1000))

    def submit(self, file: Path) -> float:
        """Megabytes that the command took at most."""
        process = subprocess.Popen(
            shardq_argv("submit", str(file), "--model", MODEL), env=self.environment, stdout=subprocess.DEVNULL
        )
        most = 0.0
        while process.poll() is None:
            most = max(most, resident_of(process.pid)[0])
            time.sleep(LOOK_S)
        if process.returncode:
            sys.exit("the jobs could not be submitted")
        return most

    def look_at_the_dashboard(self) -> None:
        """As an open page does, every now and then."""
        with urllib.request.urlopen(f"{self.flower_url}/{_DATATABLE}", timeout=30) as reply:
            reply.read()


def measure(setup: Setup, directory: Path, say: Callable[[str], None]) -> tuple[dict[str, Resident], float]:
    """The most that was resident in each phase, and what `shardq submit` took beside it."""
    phases: dict[str, Resident] = {}
    with ExitStack() as cleanup:
        host = Host(directory, setup, cleanup)
        _wait(lambda: _answers(host.flower_url))
        with host.watched() as phases["at rest"]:
            time.sleep(REST_S)
        say("at rest")
        write_prompts(directory / "prompts.jsonl", setup.jobs)
        with host.watched() as phases["submitting"]:
            submit_mb = host.submit(directory / "prompts.jsonl")
            _wait(lambda: host.num_waiting() == setup.jobs)
        say(f"{host.num_waiting():,} jobs are queued")
        with host.watched() as phases["queued"]:
            time.sleep(REST_S)
        put_frames(host.wire.url)
        with host.watched() as phases["draining"], fake_head(host):
            _wait(lambda: _drained(host, setup.drain), timeout_s=1800)
        say(f"{host.num_done():,} jobs are done")
    return phases, submit_mb


def _drained(host: Host, wanted: int) -> bool:
    host.look_at_the_dashboard()
    time.sleep(1.0)
    return host.num_done() >= wanted


@contextmanager
def fake_head(host: Host) -> Iterator[None]:
    """A head whose engine finishes 64 jobs at a time, each after a moment."""
    arguments = ["-m", "tests.integration.fake_engine", host.queue.url, "0.05", "64", MODEL]
    process = subprocess.Popen([sys.executable, *arguments], env=host.environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def put_frames(url: str) -> None:
    """Lay frames on the wire server."""
    with redis.Redis.from_url(url, protocol=2) as client:
        for number in range(FRAMES):
            client.xadd(f"shardq:link:tail:1:{number}:up", {"frame": random.randbytes(FRAME_BYTES)}, id="1-0")


def write_prompts(path: Path, lines: int) -> None:
    """Prompts of 1 to 2 KB."""
    rng = random.Random(1)
    words = [word for word in Path(__file__).read_text(encoding="utf-8").split() if word.isalpha()]
    with path.open("w", encoding="utf-8") as out:
        for number in range(lines):
            length = rng.randint(1000, 2000)
            text = " ".join(rng.choices(words, k=length))[:length]
            out.write(
                json.dumps({"custom_id": f"job-{number}", "messages": [{"role": "user", "content": text}]}) + "\n"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthcheck", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _wait(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("timed out")
        time.sleep(0.1)


def main() -> int:
    """Print the figures; 1 if all processes together take more than wanted."""
    parser = argparse.ArgumentParser(description="Measure the memory of the public host's processes.")
    parser.add_argument("--jobs", type=int, default=Setup.jobs, help="jobs queued at once")
    parser.add_argument("--drain", type=int, default=Setup.drain, help="jobs that a head finishes")
    setup = Setup(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="shardq-host-") as directory:
        phases, submit_mb = measure(setup, Path(directory), lambda text: print(text, file=sys.stderr))
    print(f"{setup.jobs:,} jobs queued, {setup.drain:,} drained, {os.cpu_count()} cores, MB resident (PSS)\n")
    print(table(phases))
    most = max(phase.together_mb for phase in phases.values())
    print(
        f"\nmost together {most:.0f} MB (wanted: at most {WANTED_MB}); `shardq submit` beside them {submit_mb:.0f} MB"
    )
    return int(most > WANTED_MB)


if __name__ == "__main__":
    sys.exit(main())
