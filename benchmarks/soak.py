"""Thousands of short jobs through the whole system: does memory stay flat, and the pace? `python -m benchmarks.soak`.

Real processes (bookkeeper, tail, head with its fronts, both Redis servers) and a tiny random model, so that what is
measured is the way of a job and not the model. Every process' resident memory and processor time are read from /proc
every two seconds.

Flat memory: after a warm-up (the first fifth of the jobs) a process' median over the last tenth of the samples lies at
most `GROWTH_SHARE` or `GROWTH_MB`, whichever is more, above its median over the first tenth. Some growth is meant: an
engine remembers its last 10,000 outcomes, the queue server a done marker per job for an hour.

Pace: jobs per second over the first and over the last `WINDOW` jobs, ramp and drain apart. Other work on the machine
moves it; processor seconds per job, which that work moves far less, stand beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from storage.database import Database
from storage.jobs import iterate_results
from storage.states import JobState
from tests.acceptance.system import System
from tests.chaos import proc

#: jobs in each of the two windows whose paces are compared
WINDOW = 1000
#: share by which the last window's pace may differ from the first's
PACE_SHARE = 0.05
#: jobs left out at the start, while caches and connections warm up, and at the end, when slots run empty
RAMP, DRAIN = 200, 100
#: growth of a process that still counts as flat
GROWTH_SHARE, GROWTH_MB = 0.03, 4.0
#: seconds between two samples
SAMPLE_S = 2.0
#: seconds the whole run may take
TIMEOUT_S = 3600.0

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes at one moment."""

    #: Unix time
    at: float
    #: by process
    resident_mb: Mapping[str, float]
    #: processor seconds of all together so far
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Growth:
    """A process' memory after the warm-up and at the end."""

    process: str
    begin_mb: float
    end_mb: float

    @property
    def is_flat(self) -> bool:
        return self.end_mb - self.begin_mb <= max(GROWTH_MB, GROWTH_SHARE * self.begin_mb)


@dataclass(frozen=True, slots=True)
class Pace:
    """One window of jobs."""

    jobs_per_s: float
    cpu_s_per_job: float


def growths(samples: Sequence[Sample], since: float) -> list[Growth]:
    """Memory of every process that was there all the time after `since`: medians of the first and last tenth."""
    kept = [sample for sample in samples if sample.at >= since]
    if len(kept) < 2:
        return []
    tenth = max(1, len(kept) // 10)
    names = set.intersection(*(set(sample.resident_mb) for sample in kept))
    return [
        Growth(
            name,
            median(sample.resident_mb[name] for sample in kept[:tenth]),
            median(sample.resident_mb[name] for sample in kept[-tenth:]),
        )
        for name in sorted(names)
    ]


def paces(ended: Sequence[float], samples: Sequence[Sample], window: int = WINDOW) -> tuple[Pace, Pace]:
    """The first and the last window; `ended` are the Unix times at which jobs were recorded.

    Windows begin and end with a recorded job. Raises ValueError if there are not enough jobs for two of them.
    """
    kept = sorted(ended)[RAMP : len(ended) - DRAIN]
    if len(kept) < 2 * window:
        raise ValueError(f"{len(ended)} jobs are too few: two windows of {window}, ramp and drain are wanted")
    return _pace(kept[: window + 1], samples), _pace(kept[-window - 1 :], samples)


def _pace(ended: Sequence[float], samples: Sequence[Sample]) -> Pace:
    num_jobs, seconds = len(ended) - 1, ended[-1] - ended[0]
    return Pace(num_jobs / seconds, (_cpu_at(ended[-1], samples) - _cpu_at(ended[0], samples)) / num_jobs)


def _cpu_at(at: float, samples: Sequence[Sample]) -> float:
    """Processor seconds at a moment between two samples."""
    after = next((number for number, sample in enumerate(samples) if sample.at >= at), len(samples) - 1)
    right, left = samples[after], samples[max(after - 1, 0)]
    share = (at - left.at) / (right.at - left.at) if right.at > left.at else 1.0
    return left.cpu_s + min(share, 1.0) * (right.cpu_s - left.cpu_s)


class Sampler:
    """Samples from a thread of its own until closed."""

    def __init__(self, system: System) -> None:
        self._pids = pids(system)
        self.samples: list[Sample] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_S):
            resident = {name: proc.resident_bytes(pid) / MB for name, pid in self._pids.items()}
            cpu_s = sum(proc.cpu_s(pid) for pid in self._pids.values())
            self.samples.append(Sample(time.time(), {name: mb for name, mb in resident.items() if mb}, cpu_s))


def pids(system: System) -> dict[str, int]:
    """Every process of the system by a name for the table."""
    found = {"queue server": system.queue.pid, "wire server": system.wire.pid}
    for name in ("bookkeeper", "tail", "head"):
        found[name] = system.pid(name)
    for number, front in enumerate(proc.children(found["head"])):
        found[f"front {number}"] = front
    return found


def write_jobs(path: Path, count: int) -> None:
    """A file of short jobs, greedy and sampled."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            job = {"prompt": f"job {number}", "max_tokens": 4 + number % 8, "temperature": number % 2, "seed": number}
            file.write(json.dumps(job) + "\n")


@dataclass(frozen=True, slots=True)
class Soak:
    """What was measured."""

    num_jobs: int
    wall_s: float
    growths: list[Growth]
    first: Pace
    last: Pace

    @property
    def pace_ratio(self) -> float:
        """Last window over first."""
        return self.last.jobs_per_s / self.first.jobs_per_s

    @property
    def passed(self) -> bool:
        return all(growth.is_flat for growth in self.growths) and abs(self.pace_ratio - 1) <= PACE_SHARE

    def report(self) -> str:
        """A table and a verdict."""
        lines = [f"{self.num_jobs} jobs in {self.wall_s:.0f} s", f"{'process':<14} {'after warm-up':>14} {'end':>9}"]
        for it in self.growths:
            verdict = "flat" if it.is_flat else "GROWS"
            lines.append(f"{it.process:<14} {it.begin_mb:>11.1f} MB {it.end_mb:>6.1f} MB  {verdict}")
        cpu_ratio = self.last.cpu_s_per_job / self.first.cpu_s_per_job
        lines += [
            f"jobs/s:          first window {self.first.jobs_per_s:.2f}, last {self.last.jobs_per_s:.2f}, "
            f"ratio {self.pace_ratio:.3f} (wanted within {PACE_SHARE:.0%})",
            f"processor s/job: first window {self.first.cpu_s_per_job:.4f}, last {self.last.cpu_s_per_job:.4f}, "
            f"ratio {cpu_ratio:.3f}",
            "passed" if self.passed else "FAILED",
        ]
        return "\n".join(lines)


def run(directory: Path, num_jobs: int, window: int) -> Soak:
    """Start a system, run the jobs, measure. Fails if a job does not complete."""
    from tests.models import tiny_model  # imports torch: the verdicts are tested without it

    jobs = directory / "jobs.jsonl"
    write_jobs(jobs, num_jobs)
    with System(directory / "system", tiny_model(directory / "tiny")) as system:
        system.start_bookkeeper()
        system.start_tail(slots=16)
        system.start_head(slots=16)
        system.wait_consuming()
        began = time.time()
        with closing(Sampler(system)) as sampler:
            result = system.shardq("submit", str(jobs))
            if result.returncode != 0:
                raise RuntimeError(result.stderr)
            name = result.stdout.split()[0]
            report = system.wait_for(name, timeout_s=TIMEOUT_S)
            # memory at rest belongs to the end
            time.sleep(2 * SAMPLE_S)
        if report.counts.completed != num_jobs:
            raise RuntimeError(f"not every job completed: {report.counts}")
        with closing(Database.open(system.environment["SHARDQ_DATABASE_URL"])) as database:
            rows = iterate_results(database, name, states=(JobState.COMPLETED,))
            ended = sorted(row.recorded_at for row in rows if row.recorded_at is not None)
    first, last = paces(ended, sampler.samples, window)
    return Soak(num_jobs, ended[-1] - began, growths(sampler.samples, ended[num_jobs // 5]), first, last)


def main() -> int:
    """Print what was measured; the exit status is 0 if it passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--window", type=int, default=WINDOW, help="jobs in each of the two windows compared")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak = run(Path(directory), given.jobs, given.window)
    print(soak.report())
    return 0 if soak.passed else 1


if __name__ == "__main__":
    sys.exit(main())
