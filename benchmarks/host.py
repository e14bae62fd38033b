"""What the public host's processes take of memory: `python -m benchmarks.host --jobs 10000`.

Both Redis servers, bookkeeper and Flower are real. A batch of prompts of 1 to 2 KB is submitted; then real fronts with
an engine that has no model drain a part of it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import redis

from cli.processes import Processes, child_environment, shardq_argv
from relay.embedded import EmbeddedRedis
from relay.profile import Profile
from tasks import keys
from tasks.connection import connect
from tasks.heads import register_profile
from tasks.settings import TaskSettings
from tests.chaos.proc import children
from tests.integration.fake_engine import AUTHKEY, HEAD, MODEL, FakeEngine
from workers.head.channel import private_address
from workers.head.fronts import Fronts
from workers.settings import HeadSettings

#: seconds until processes that were just started have settled
SETTLE_S = 8.0
PROFILE = Profile("f" * 64, "float32", "none", "float32", False, 4096)
WORDS = ("the", "of", "model", "server", "prompt", "answer", "question", "between", "number", "people", "result")


def prompts(count: int) -> Iterator[str]:
    """Lines of a file of prompts, 1 to 2 KB each; always the same ones."""
    dice = random.Random(7)
    for number in range(count):
        text = " ".join(dice.choices(WORDS, k=dice.randint(160, 320)))
        yield json.dumps({"custom_id": f"job-{number}", "prompt": text, "max_tokens": 64}) + "\n"


def pss_mb(pid: int) -> float:
    """Proportional share of resident memory: pages that several processes share are counted once in all."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024


class Host:
    """The host's processes by name, and what they took at each moment looked at."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._moments: dict[str, dict[str, float]] = {}

    def look(self, moment: str) -> None:
        """Measure; of several looks at one moment the largest figure of each process counts."""
        seen = self._moments.setdefault(moment, {})
        for name, pid in self._pids.items():
            mb = sum(map(pss_mb, [pid, *children(pid)]))
            seen[name] = max(mb, seen.get(name, 0.0))

    def table(self) -> str:
        """Megabytes, in Markdown."""
        head = ["| MB (PSS) | " + " | ".join(self._moments) + " |", "|---|" + "---|" * len(self._moments)]
        rows = [
            f"| {name} | " + " | ".join(f"{seen[name]:.0f}" for seen in self._moments.values()) + " |"
            for name in self._pids
        ]
        total = " | ".join(f"{sum(seen.values()):.0f}" for seen in self._moments.values())
        return "\n".join([*head, *rows, f"| together | {total} |"])


def drain(host: Host, client: redis.Redis, url: str, seconds: float) -> int:
    """Let fronts take jobs for so long; the number of jobs they were given."""
    with private_address() as address, closing(FakeEngine(address, slots=16, delay_s=0.05)) as engine:
        settings = HeadSettings(model=MODEL, broker_url=url, head_id=HEAD)
        client.set(keys.head(HEAD), "alive")
        with closing(Fronts(settings, address, AUTHKEY, model=MODEL, count=2, concurrency_total=20, grace_s=2.0)):
            engine.server.set_consuming(True)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(1.0)
                host.look("draining")
        return len(engine.delivered)


def measure(num_jobs: int, drain_s: float, directory: Path) -> None:
    """Print the table."""
    with ExitStack() as cleanup:
        queue = cleanup.enter_context(EmbeddedRedis(directory / "queue", persistent=True))
        wire = cleanup.enter_context(EmbeddedRedis(directory / "wire", persistent=False))
        environment = {
            "SHARDQ_DATA_DIR": str(directory),
            "SHARDQ_DATABASE_URL": f"sqlite:///{directory / 'shardq.sqlite3'}",
            "SHARDQ_BROKER_URL": queue.url,
            "SHARDQ_RELAY_URL": wire.url,
        }
        client = cleanup.enter_context(closing(connect(TaskSettings(broker_url=queue.url))))
        register_profile(client, MODEL, PROFILE)
        processes = Processes(lambda name, line: None)
        cleanup.callback(processes.stop, ("flower", "bookkeeper"))
        pids = {"queue": queue.pid, "wire": wire.pid}
        for name in ("bookkeeper", "flower"):
            child = processes.start(name, shardq_argv(name, *(["--port", "15555"] * (name == "flower"))), environment)
            pids[name] = child.process.pid
        host = Host(pids)
        time.sleep(SETTLE_S)
        host.look("at rest")
        file = directory / "prompts.jsonl"
        file.write_text("".join(prompts(num_jobs)), encoding="utf-8")
        submit = shardq_argv("submit", str(file), "--model", MODEL)
        subprocess.run(submit, env=child_environment(environment), check=True, stdout=sys.stderr)
        time.sleep(SETTLE_S)
        host.look(f"{num_jobs:,} queued")
        taken = drain(host, client, queue.url, drain_s)
        print(f"{taken:,} of {num_jobs:,} jobs were taken in {drain_s:.0f} s.\n\n{host.table()}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--drain-s", type=float, default=60.0, help="seconds of draining (default: 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(options.jobs, options.drain_s, Path(directory))


if __name__ == "__main__":
    main()
