"""A campaign cut into pieces that several processes share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

from tests.fuzz.campaign import BLOCK, Finding, Report, fuzz, limit_memory, limited_time, resident_mb, run_one
from tests.fuzz.strategies import STRATEGIES
from tests.fuzz.targets import BY_NAME, SHARES, quiet

#: of a thousand inputs, those that Hypothesis builds
HYPOTHESIS_SHARE = 10
#: inputs of one piece of work
PIECE = 20 * BLOCK
#: megabytes that a process may grow by over the whole campaign
MAX_GROWTH_MB = 256
#: bytes of address space that a process may grow by at any time
ROOM_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Piece:
    """Inputs of one target for one process."""

    target: str
    count: int
    seed: int
    #: blocks before it; None: Hypothesis builds the inputs
    first_block: int | None


def pieces(count: int, seed: int, names: list[str]) -> Iterator[Piece]:
    """`count` inputs over the targets, by their shares."""
    total = sum(SHARES[name] for name in names)
    for name in names:
        share = -(-count * SHARES[name] // total)
        built = max(1, share * HYPOTHESIS_SHARE // 1000)
        yield Piece(name, built, seed, None)
        for start in range(0, share - built, PIECE):
            yield Piece(name, min(PIECE, share - built - start), seed, start // BLOCK)


def work(piece: Piece) -> tuple[Report, float]:
    """One piece; its report and the most megabytes that this process ever held."""
    target = BY_NAME[piece.target]
    report = build(piece) if piece.first_block is None else fuzz(target, piece.count, piece.seed, piece.first_block)
    return report, resident_mb()


def build(piece: Piece) -> Report:
    """Inputs from Hypothesis until the first finding, which it shrinks."""
    target, report, began = BY_NAME[piece.target], Report(piece.target), time.monotonic()

    @seeded(piece.seed)
    @settings(max_examples=piece.count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(STRATEGIES[piece.target])
    def attempt(data: bytes) -> None:
        one = Report(piece.target)
        run_one(target, data, one)
        report.findings = one.findings
        one.findings = []
        report.add(one)
        if report.findings:
            raise AssertionError(str(report.findings[0]))

    try:
        with limited_time():
            attempt()
    except Exception as error:  # noqa: BLE001 - the shrunk finding is in the report, or Hypothesis has one of its own
        report.findings = report.findings or [Finding(piece.target, b"", f"{type(error).__name__}: {error}")]
    report.took_s = time.monotonic() - began
    return report


def begin() -> None:
    """In each process, before its first piece."""
    quiet()
    limit_memory(ROOM_BYTES)


def campaign(count: int, seed: int, names: list[str], jobs: int) -> tuple[list[Report], float]:
    """All pieces, `jobs` at a time: a report for each target, and the most megabytes that one process held."""
    reports = {name: Report(name) for name in names}
    peak_mb = 0.0
    with ProcessPoolExecutor(jobs, initializer=begin) as pool:
        for report, held_mb in pool.map(work, pieces(count, seed, names)):
            reports[report.target].add(report)
            peak_mb = max(peak_mb, held_mb)
    return list(reports.values()), peak_mb
