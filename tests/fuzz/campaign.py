"""Many damaged inputs, each under a limit of time and memory; what breaks is kept with how to see it again."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.targets import Target

#: seconds of processor time that one input may take
MAX_INPUT_S = 2.0
#: bytes that the work on one input may hold at its peak
MAX_PEAK_BYTES = 48 << 20
#: every so many-th input is run again with its memory traced, which is slow
TRACED_EVERY = 500
#: inputs drawn from one random generator: one of them is found again from its block alone
BLOCK = 1000
#: findings kept of a target
MAX_FINDINGS = 20


class Hung(BaseException):
    """An input took too long. No `Exception`: no reader may swallow it."""


class TooLarge(AssertionError):
    """An input made its reader hold too much."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that broke its reader."""

    target: str
    data: bytes
    error: str

    def __str__(self) -> str:
        return f"{self.target}: {self.error}\n  {self.data[:400]!r}"


@dataclass(slots=True)
class Report:
    """What a campaign on one target saw."""

    target: str
    inputs: int = 0
    taken: int = 0
    slowest_s: float = 0.0
    largest_bytes: int = 0
    peak_bytes: int = 0
    took_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Count in what another part of the campaign saw."""
        self.inputs += other.inputs
        self.taken += other.taken
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.largest_bytes = max(self.largest_bytes, other.largest_bytes)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.took_s += other.took_s
        self.findings += other.findings

    def line(self) -> str:
        """One row of the summary."""
        return (
            f"{self.target:<18} {self.inputs:>9,} {self.taken:>9,} {self.inputs - self.taken:>9,} "
            f"{1000 * self.slowest_s:>9.1f} {self.largest_bytes / 1000:>9.1f} {self.peak_bytes / 1e6:>8.1f} "
            f"{self.took_s:>7.1f} {len(self.findings):>8}"
        )


HEADER = (
    f"{'target':<18} {'inputs':>9} {'taken':>9} {'refused':>9} {'slowest ms':>10} {'largest KB':>9} "
    f"{'peak MB':>7} {'s':>7} {'findings':>8}"
)


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raise `Hung` in what runs for longer than `MAX_INPUT_S`; for the main thread."""

    def end(*_: object) -> None:
        raise Hung(f"more than {MAX_INPUT_S:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(target: Target, count: int, seed: int, first_block: int = 0) -> Report:
    """`count` inputs of a target; the same seed gives the same inputs."""
    report, began = Report(target.name), time.monotonic()
    with limited_time():
        for block in range(first_block, first_block + -(-count // BLOCK)):
            inputs = target.inputs(Random(f"{seed}/{target.name}/{block}"))
            for _ in range(min(BLOCK, count - report.inputs)):
                run_one(target, next(inputs), report)
            if len(report.findings) >= MAX_FINDINGS:
                break
    report.took_s = time.monotonic() - began
    return report


def run_one(target: Target, data: bytes, report: Report) -> None:
    """Check one input and add what became of it; `limited_time` is around."""
    report.inputs += 1
    report.largest_bytes = max(report.largest_bytes, len(data))
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_INPUT_S)
    try:
        report.taken += target.check(data)
        if report.inputs % TRACED_EVERY == 0:
            report.peak_bytes = max(report.peak_bytes, _peak_of(target, data))
    except (Exception, Hung) as error:  # noqa: BLE001 - whatever it is, it is a finding
        if len(report.findings) < MAX_FINDINGS:
            report.findings.append(Finding(target.name, data, _shown(error)))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    report.slowest_s = max(report.slowest_s, time.process_time() - began)


def _peak_of(target: Target, data: bytes) -> int:
    tracemalloc.start()
    try:
        target.check(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MAX_PEAK_BYTES:
        raise TooLarge(f"{peak} bytes held for an input of {len(data)}")
    return peak


def _shown(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))
    return f"{type(error).__name__}: {str(error)[:200]} ({where})"


def limit_memory(room_bytes: int) -> None:
    """Let this process grow by at most `room_bytes` of address space: more ends in MemoryError, a finding."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + room_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def resident_mb() -> float:
    """The most memory this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
