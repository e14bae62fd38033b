"""Tokens per second of the demo's model on this machine, by draft length: `python -m benchmarks.batch`.

Each line is one run of `shardq demo` with real processes; the first run of a machine converts the model.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys

from cli.processes import child_environment, shardq_argv

DRAFT_LENGTHS = (0, 2, 4, 8)


def run(draft_length: int) -> dict[str, float]:
    """The figures of one run."""
    argv = shardq_argv("demo", "--json", "--draft-length", str(draft_length))
    output = subprocess.run(argv, env=child_environment({}), stdout=subprocess.PIPE, check=True).stdout
    figures: dict[str, float] = json.loads(output)["figures"]
    return figures


def main() -> None:
    """Print a table as it fills."""
    print(f"{platform.machine()}, Python {platform.python_version()}, 16 prompts at once")
    print(f"{'K':>3} {'tokens/s':>9} {'tokens/round':>13} {'acceptance':>11} {'wall s':>7}")
    for draft_length in DRAFT_LENGTHS:
        figures = run(draft_length)
        acceptance = f"{figures['acceptance']:.0%}" if figures["acceptance"] is not None else "–"
        print(
            f"{draft_length:>3} {figures['batch_tps']:>9.1f} {figures['tokens_per_round']:>13.2f} "
            f"{acceptance:>11} {figures['wall_s']:>7.1f}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
