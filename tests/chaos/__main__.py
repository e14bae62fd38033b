"""`python -m tests.chaos --jobs 200 --faults 100 --seed 1`: see docs/chaos.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.chaos.campaign import Options, run
from tests.chaos.plan import Kind
from tests.chaos.report import report
from tests.models import tiny_model


def main() -> int:
    """Run one campaign; the exit status is 0 if every check passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Damage a whole system and look.")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="draws jobs and faults")
    parser.add_argument("--heads", type=int, default=2, help="there is one tail more than heads")
    parser.add_argument(
        "--kind", action="append", choices=list(Kind), help="only this kind; may be given several times"
    )
    parser.add_argument("--directory", type=Path, help="keep database and logs here; must not exist")
    given = parser.parse_args()
    kinds = tuple(Kind(name) for name in given.kind) if given.kind else tuple(Kind)
    options = Options(jobs=given.jobs, faults=given.faults, seed=given.seed, num_heads=given.heads, kinds=kinds)
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - began:7.1f} {text}", err=True)

    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        directory = given.directory or Path(temporary) / "system"
        campaign = run(directory, tiny_model(Path(temporary) / "tiny"), options, say)
    click.echo(report(campaign))
    return 0 if campaign.passed else 1


if __name__ == "__main__":
    sys.exit(main())
