"""The fuzzing campaign: `make fuzz`, or `python -m tests.fuzz --inputs 1000000 --seed 1`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

from tests.fuzz.campaign import HEADER, Finding, Report, fuzz, limit_memory, resident_mb, run_one
from tests.fuzz.strategies import STRATEGIES
from tests.fuzz.targets import BY_NAME, SHARES, TARGETS, Target, quiet

#: of a thousand inputs, those that Hypothesis builds
HYPOTHESIS_SHARE = 10
#: megabytes that the process may grow by over the whole campaign
MAX_GROWTH_MB = 256


def build(target: Target, count: int, seed: int) -> Report:
    """`count` inputs from Hypothesis; stops at the first finding, which it shrinks."""
    report, began = Report(target.name), time.monotonic()

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(STRATEGIES[target.name])
    def attempt(data: bytes) -> None:
        one = Report(target.name)
        run_one(target, data, one)
        report.inputs += 1
        report.taken += one.taken
        report.slowest_s = max(report.slowest_s, one.slowest_s)
        report.largest_bytes = max(report.largest_bytes, one.largest_bytes)
        if one.findings:
            report.findings[:] = one.findings
            raise AssertionError(str(one.findings[0]))

    try:
        attempt()
    except AssertionError:
        pass  # the shrunk finding is in the report
    except BaseException as error:  # noqa: BLE001 - Hypothesis itself has something to say
        report.findings.append(Finding(target.name, b"", f"{type(error).__name__}: {error}"))
    report.took_s = time.monotonic() - began
    return report


def campaign(count: int, seed: int, names: list[str]) -> list[Report]:
    """`count` inputs over the targets, by their shares."""
    total = sum(SHARES[name] for name in names)
    reports = []
    for name in names:
        share = -(-count * SHARES[name] // total)
        built = build(BY_NAME[name], max(1, share * HYPOTHESIS_SHARE // 1000), seed)
        report = fuzz(BY_NAME[name], max(0, share - built.inputs), seed)
        report.inputs += built.inputs
        report.taken += built.taken
        report.took_s += built.took_s
        report.slowest_s = max(report.slowest_s, built.slowest_s)
        report.largest_bytes = max(report.largest_bytes, built.largest_bytes)
        report.findings = built.findings + report.findings
        sys.stdout.write(report.line() + "\n")
        sys.stdout.flush()
        reports.append(report)
    return reports


def main() -> int:
    """Print what was seen; 1 if anything broke."""
    parser = argparse.ArgumentParser(description="Feed damaged inputs to everything that reads foreign bytes.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[target.name for target in TARGETS], help="one target")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that broke something")
    arguments = parser.parse_args()
    quiet()
    before = resident_mb()
    limit_memory(2 << 30)
    began = time.monotonic()
    sys.stdout.write(HEADER + "\n")
    reports = campaign(arguments.inputs, arguments.seed, arguments.only or [target.name for target in TARGETS])
    growth = resident_mb() - before
    findings = [finding for report in reports for finding in report.findings]
    took_s = time.monotonic() - began
    inputs = sum(report.inputs for report in reports)
    sys.stdout.write(
        f"{inputs:,} inputs in {took_s:.0f} s, seed {arguments.seed}: {len(findings)} findings; "
        f"memory grew by {growth:.0f} MB to {before + growth:.0f} MB\n"
    )
    for number, finding in enumerate(findings):
        sys.stdout.write(f"{finding}\n")
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{finding.target.replace(' ', '-')}-{number}").write_bytes(finding.data)
    return 1 if findings or growth > MAX_GROWTH_MB else 0


if __name__ == "__main__":
    sys.exit(main())
