"""The fuzzing campaign: `make fuzz`, or `python -m tests.fuzz --inputs 1000000 --seed 1`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.fuzz.campaign import HEADER, resident_mb
from tests.fuzz.pieces import MAX_GROWTH_MB, campaign
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Print what was seen; 1 if anything broke."""
    parser = argparse.ArgumentParser(description="Feed damaged inputs to everything that reads foreign bytes.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", action="append", choices=[target.name for target in TARGETS], help="one target")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that broke something")
    arguments = parser.parse_args()
    before_mb, began = resident_mb(), time.monotonic()
    names = arguments.only or [target.name for target in TARGETS]
    reports, peak_mb = campaign(arguments.inputs, arguments.seed, names, arguments.jobs)
    findings = [finding for report in reports for finding in report.findings]
    inputs = sum(report.inputs for report in reports)
    lines = [HEADER, *(report.line() for report in reports)]
    lines.append(
        f"{inputs:,} inputs in {time.monotonic() - began:.0f} s, seed {arguments.seed}: {len(findings)} findings; "
        f"a process held {peak_mb:.0f} MB at most, {before_mb:.0f} MB before its first input"
    )
    sys.stdout.write("\n".join([*lines, *map(str, findings)]) + "\n")
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        for number, finding in enumerate(findings):
            (arguments.keep / f"{finding.target.replace(' ', '-')}-{number}").write_bytes(finding.data)
    return 1 if findings or peak_mb - before_mb > MAX_GROWTH_MB else 0


if __name__ == "__main__":
    sys.exit(main())
