"""A very large file from submission to results: `python -m benchmarks.large`.

Nothing is generated: outcomes are written through `storage.outcomes`, those of the first jobs as they come out of the
queue, so that a real bookkeeper feeds while it is measured. Memory is read from /proc: Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import redis

from cli.processes import child_environment, shardq_argv
from relay.embedded import EmbeddedRedis
from relay.profile import Profile
from storage.addresses import sqlite_url
from storage.database import Database
from storage.job_records import OutcomeRow
from storage.outcomes import record_outcomes
from storage.states import JobState
from tasks import keys, queues
from tasks.heads import register_profile

MODEL = "large"
PROFILE = Profile("f00d", "float32", "none", "float32", deterministic=False, context=4096)
#: outcomes written in one transaction
CHUNK = 200
#: seconds between two looks at a process' or the server's memory
LOOK_S = 0.02

WORDS = ["the", "relay", "carries", "hidden", "states", "across", "an", "ocean", "while", "naïve", "drafts", "wait"]
#: a line of each kind that cannot be a job
BAD_LINES: tuple[Callable[[int], str], ...] = (
    lambda n: '{"prompt": "cut off',
    lambda n: json.dumps({"custom_id": f"bad-{n}", "prompt": ""}),
    lambda n: json.dumps({"custom_id": f"bad-{n}", "prompt": "x", "temprature": 1}),
    lambda n: json.dumps({"custom_id": f"bad-{n}", "prompt": "x", "max_tokens": 0}),
    lambda n: json.dumps({"messages": [{"role": "robot", "content": "x"}]}),
    lambda n: '{"prompt": "x", "temperature": NaN}',
    lambda n: json.dumps([n]),
)


@dataclass(frozen=True)
class Setup:
    """How much of everything."""

    lines: int = 100_000
    bad: int = 1_000
    #: jobs that go through the queue; the others end without
    through_queue: int = 5_000
    #: lines of 24,000 characters, for the window's limit in bytes
    long_lines: int = 3_000


@dataclass(slots=True)
class Run:
    """A command that ended."""

    took_s: float
    #: of the processor: what `took_s` would be on an idle machine, about
    cpu_s: float
    peak_mb: float
    stdout: str
    stderr: str
    status: int


@dataclass(slots=True)
class Figures:
    """What came out; megabytes are 2^20 bytes."""

    submit_s: float = 0.0
    submit_cpu_s: float = 0.0
    submit_mb: float = 0.0
    #: most memory of the queue server above that of an empty one: while submitting, while jobs flow, with long lines
    queue_mb: float = 0.0
    flow_mb: float = 0.0
    long_mb: float = 0.0
    #: jobs fed and taken per second while they flowed
    fed_per_s: float = 0.0
    results_s: float = 0.0
    results_cpu_s: float = 0.0
    results_mb: float = 0.0
    results_lines: int = 0
    check_s: float = 0.0
    check_cpu_s: float = 0.0
    check_mb: float = 0.0
    bad_named: int = 0
    #: lines that the refusal printed
    bad_printed: int = 0
    wanted: list[str] = field(default_factory=list)


class Site:
    """A directory with a queue server and a database of its own."""

    def __init__(self, directory: Path, server: EmbeddedRedis, **settings: str) -> None:
        self.directory = directory
        self.client = redis.Redis.from_url(server.url, protocol=2)
        self.database_url = sqlite_url(directory / "shardq.sqlite3")
        self.environment = child_environment(
            {
                "SHARDQ_DATA_DIR": str(directory),
                "SHARDQ_BROKER_URL": server.url,
                "SHARDQ_DATABASE_URL": self.database_url,
                **settings,
            }
        )

    def run(self, *arguments: str) -> Run:
        """`shardq` with these arguments; its output goes through files, as a long one would fill a pipe."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began, cpu_began = time.monotonic(), children_cpu_s()
            process = subprocess.Popen(shardq_argv(*arguments), env=self.environment, stdout=out, stderr=err)
            peak_mb = 0.0
            while process.poll() is None:
                peak_mb = max(peak_mb, peak_of(process.pid))
                time.sleep(LOOK_S)
            took_s, cpu_s = time.monotonic() - began, children_cpu_s() - cpu_began
            return Run(took_s, cpu_s, peak_mb, written_to(out), written_to(err), process.returncode)

    @contextmanager
    def bookkeeper(self) -> Iterator[None]:
        """A bookkeeper at work; its lines go to a file in the directory."""
        with (self.directory / "bookkeeper.log").open("wb") as log:
            argv = shardq_argv("bookkeeper", "--log-level", "warning")
            process = subprocess.Popen(argv, env=self.environment, stdout=log, stderr=log)
            try:
                yield
            finally:
                process.terminate()
                process.wait()


class ServerMemory:
    """Looks at a server's memory all the time; `take` gives the most since the last one, in megabytes."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._empty = self._used()
        self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def take(self) -> float:
        """The most memory above the empty server's."""
        peak, self._peak = max(self._peak, self._used()), 0
        return (peak - self._empty) / 2**20

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._peak = max(self._peak, self._used())


def children_cpu_s() -> float:
    """Seconds of the processor that ended children have taken so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_of(pid: int) -> float:
    """The most memory a process has held so far, in megabytes; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(found.split()[1]) / 1024


def write_file(path: Path, lines: int, *, bad: Sequence[int] = (), words: tuple[int, int] = (40, 140)) -> None:
    """Lines of both forms; those numbered in `bad` cannot be jobs."""
    rng, wrong = random.Random(1), set(bad)
    with path.open("w", encoding="utf-8") as out:
        for number in range(1, lines + 1):
            if number in wrong:
                out.write(BAD_LINES[number % len(BAD_LINES)](number) + "\n")
                continue
            prompt = " ".join(rng.choices(WORDS, k=rng.randint(*words)))
            out.write(json.dumps(_request(number, prompt), ensure_ascii=False) + "\n")


def _request(number: int, prompt: str) -> dict[str, object]:
    if number % 2:
        return {"custom_id": f"job-{number}", "prompt": prompt, "max_tokens": 256, "temperature": 0.7, "seed": number}
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 256}
    return {"custom_id": f"job-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def outcome(job: str) -> OutcomeRow:
    """A completed generation of some length."""
    text = " ".join(WORDS[(len(job) + n) % len(WORDS)] for n in range(90))
    figures = {"prompt_tokens": 120, "started_at": 1.0, "finished_at": 4.0, "ttft_s": 0.3, "decode_tps": 40.0}
    return OutcomeRow(
        job,
        1,
        "head",
        JobState.COMPLETED,
        text,
        tuple(range(1000, 1120)),
        "stop",
        **figures,  # type: ignore[arg-type]
    )


def written_to(file: IO[bytes]) -> str:
    """All that a file holds."""
    file.seek(0)
    return file.read().decode()


def flow(site: Site, database: Database, count: int) -> set[str]:
    """Take messages off the queue and write their outcomes until `count` jobs have ended; their ids."""
    done: set[str] = set()
    while len(done) < count:
        popped: list[Any] = [site.client.rpop(key, CHUNK) or [] for key in keys.ready(MODEL)]
        messages = [message for some in popped for message in some]
        jobs = [queues.task_id(json.loads(message)).rpartition(".")[0] for message in messages]
        record_outcomes(database, [outcome(job) for job in jobs])
        done.update(jobs)
        if not jobs:
            time.sleep(LOOK_S)
    return done


def end_others(database: Database, batch: str, lines: int, done: set[str]) -> None:
    """Write the outcomes of all other jobs."""
    rest = [job for job in (f"{batch}-{number}" for number in range(1, lines + 1)) if job not in done]
    for start in range(0, len(rest), CHUNK):
        record_outcomes(database, [outcome(job) for job in rest[start : start + CHUNK]])


@contextmanager
def site(directory: Path, **settings: str) -> Iterator[tuple[Site, ServerMemory]]:
    """A fresh queue server that knows the model."""
    directory.mkdir()
    with EmbeddedRedis(directory / "queue", persistent=True) as server:
        running = Site(directory, server, **settings)
        register_profile(running.client, MODEL, PROFILE)
        memory = ServerMemory(running.client)
        try:
            yield running, memory
        finally:
            memory.close()


def measure(setup: Setup, directory: Path, tell: Callable[[str], None] = lambda text: None) -> Figures:
    """All of it, in this directory."""
    figures = Figures()
    with site(directory / "site") as (running, memory):
        batch = _submit(setup, running, memory, figures)
        tell("submitted")
        with Database.open(running.database_url) as database:
            with running.bookkeeper():
                began = time.monotonic()
                done = flow(running, database, min(setup.through_queue, setup.lines))
                figures.fed_per_s = len(done) / (time.monotonic() - began)
                figures.flow_mb = memory.take()
            end_others(database, batch, setup.lines, done)
        tell("ended")
        _results(running, batch, figures)
        _check(setup, running, figures)
    tell("checked")
    with site(directory / "long", SHARDQ_WINDOW_MIN_JOBS="1000000") as (running, memory):
        path = running.directory / "long.jsonl"
        write_file(path, setup.long_lines, words=(4000, 4200))
        _succeed(running.run("submit", str(path)))
        figures.long_mb = memory.take()
    figures.wanted = missed(setup, figures)
    return figures


def _submit(setup: Setup, running: Site, memory: ServerMemory, figures: Figures) -> str:
    path = running.directory / "good.jsonl"
    write_file(path, setup.lines)
    submitted = _succeed(running.run("submit", str(path)))
    figures.submit_s, figures.submit_cpu_s, figures.submit_mb = submitted.took_s, submitted.cpu_s, submitted.peak_mb
    figures.queue_mb = memory.take()
    return submitted.stdout.split()[0]


def _results(running: Site, batch: str, figures: Figures) -> None:
    path = running.directory / "out.jsonl"
    written = _succeed(running.run("results", batch, "--output", str(path)))
    figures.results_s, figures.results_cpu_s, figures.results_mb = written.took_s, written.cpu_s, written.peak_mb
    with path.open("rb") as lines:
        figures.results_lines = sum(1 for _ in lines)


def _check(setup: Setup, running: Site, figures: Figures) -> None:
    bad = sorted(random.Random(2).sample(range(1, setup.lines + 1), setup.bad))
    path, errors = running.directory / "bad.jsonl", running.directory / "errors.jsonl"
    write_file(path, setup.lines, bad=bad)
    refused = running.run("submit", str(path), "--errors", str(errors))
    figures.check_s, figures.check_cpu_s, figures.check_mb = refused.took_s, refused.cpu_s, refused.peak_mb
    named = [json.loads(line)["line"] for line in errors.read_text(encoding="utf-8").splitlines()]
    figures.bad_named = len(set(named) & set(bad)) if refused.status == 2 and len(named) == len(bad) else 0
    lines = [line.removeprefix("Error: ") for line in refused.stderr.splitlines()]
    figures.bad_printed = sum(line.startswith("line ") for line in lines)


def _succeed(run: Run) -> Run:
    if run.status:
        raise RuntimeError(f"status {run.status}: {run.stderr[-1000:]}")
    return run


def missed(setup: Setup, figures: Figures) -> list[str]:
    """The figures that are not as wanted."""
    checks = {
        "submit in under 60 s": figures.submit_s < 60,
        "submit under 300 MB": figures.submit_mb < 300,
        "queue server under 64 MB": max(figures.queue_mb, figures.flow_mb, figures.long_mb) < 64,
        "results in under 30 s": figures.results_s < 30,
        "results under 300 MB": figures.results_mb < 300,
        "a result for every line": figures.results_lines == setup.lines,
        "every bad line named": figures.bad_named == setup.bad,
    }
    return [name for name, holds in checks.items() if not holds]


def table(setup: Setup, figures: Figures) -> str:
    """The figures for people."""
    f = figures
    rows = (
        ("submit", _run(f.submit_s, f.submit_cpu_s, f.submit_mb), "< 60 s, < 300 MB"),
        ("queue server, submitting", f"{f.queue_mb:.1f} MB", "< 64 MB"),
        ("queue server, feeding", f"{f.flow_mb:.1f} MB at {f.fed_per_s:.0f} jobs/s", "< 64 MB"),
        ("queue server, 24 KB lines", f"{f.long_mb:.1f} MB", "< 64 MB"),
        ("results", _run(f.results_s, f.results_cpu_s, f.results_mb), "< 30 s"),
        ("result lines", f"{f.results_lines:,}", f"{setup.lines:,}"),
        ("check with bad lines", _run(f.check_s, f.check_cpu_s, f.check_mb), ""),
        ("bad lines named", f"{f.bad_named:,} ({f.bad_printed} printed)", f"{setup.bad:,}"),
    )
    return "\n".join(f"{name:<26} {value:<34} {wanted}".rstrip() for name, value, wanted in rows)


def _run(took_s: float, cpu_s: float, peak_mb: float) -> str:
    return f"{took_s:.1f} s ({cpu_s:.1f} s of CPU), {peak_mb:.0f} MB"


def main() -> int:
    """Print the figures; 1 if one is not as wanted."""
    parser = argparse.ArgumentParser(description="Measure what a very large file costs.")
    parser.add_argument("--lines", type=int, default=Setup.lines)
    parser.add_argument("--bad", type=int, default=Setup.bad)
    parser.add_argument("--through-queue", type=int, default=Setup.through_queue)
    parser.add_argument("--long-lines", type=int, default=Setup.long_lines)
    setup = Setup(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="shardq-large-") as directory:
        figures = measure(setup, Path(directory), lambda text: print(text, file=sys.stderr))
    print(f"{setup.lines:,} lines, {os.cpu_count()} cores")
    print(table(setup, figures))
    for name in figures.wanted:
        print(f"missed: {name}")
    return 1 if figures.wanted else 0


if __name__ == "__main__":
    sys.exit(main())
