"""All sections in one call, the table last.

Not in `__main__`: the sections' own processes import what they are given from here.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.bench import REAL_SIZES, TINY_SIZES, Bench
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row, table, write
from benchmarks.gpu.sections import SECTIONS, rows_of
from benchmarks.gpu.shapes import REAL, TINY
from benchmarks.gpu.system import Systems
from benchmarks.gpu.timing import QUICK, REHEARSAL, THOROUGH

#: seconds that a section may take
LIMIT_S = 300
VERSIONS = ("torch", "transformers", "triton", "bitsandbytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; 1 if a row is not as wanted or could not be measured."""
    options = parser().parse_args(arguments)
    heading = [_machine(options.device), _versions(), _date(arguments)]
    chosen = {section: SECTIONS[section] for section in options.only or SECTIONS}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        make = partial(bench_of, options, Path(directory))
        start: Literal["fork", "spawn"] = "fork" if options.device == "cpu" else "spawn"
        for row in rows_of(chosen, make, options.limit_s, start):
            say(row.line())
            rows.append(row)
            write(options.out, options.name, heading, rows)
        _keep_logs(Path(directory), options.out)
    print("\n".join([*heading, "", table(rows)]), flush=True)
    return int(any(row.failed for row in rows))


def bench_of(options: argparse.Namespace, directory: Path) -> Bench:
    """What the sections are told; `directory` is for what they need while they run."""
    device = torch.device(options.device)
    tiny = options.shapes == "tiny"
    return Bench(
        device=device,
        dtype=options.dtype or ("bfloat16" if device.type == "cuda" else "float32"),
        shapes=TINY if tiny else REAL,
        sizes=TINY_SIZES if tiny else REAL_SIZES,
        effort=REHEARSAL if tiny else QUICK if options.quick else THOROUGH,
        rehearsal=tiny,
        directory=directory,
        systems=Systems(directory / "systems"),
        out=options.out,
        smollm2=options.smollm2,
        quick=options.quick,
        profile=options.profile,
    )


def _machine(device: str) -> str:
    host = f"{platform.machine()}, {platform.system()} {platform.release()}"
    if torch.device(device).type != "cuda":
        return host
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{torch.cuda.device_count()} × {properties.name}, {memory}, CUDA {torch.version.cuda}, {host}"


def _versions() -> str:
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in VERSIONS)])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def _date(arguments: Sequence[str] | None) -> str:
    chosen = " ".join(sys.argv[1:] if arguments is None else arguments) or "none"
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC; arguments: {chosen}"


def _keep_logs(directory: Path, out: Path) -> None:
    """All processes' logs in one file beside the results."""
    logs = sorted(directory.glob("systems/*/processes.log"))
    if logs:
        text = "\n".join(f"== {log.parent.name}\n{log.read_text(encoding='utf-8')}" for log in logs)
        (out / "gpu-processes.log").write_text(text, encoding="utf-8")


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [section for section in chosen if section not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SECTIONS)}")
    return chosen


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure the GPU's work.")
    made.add_argument("--only", type=_sections, metavar="SECTION,…", help=f"of {', '.join(SECTIONS)}")
    made.add_argument("--quick", action="store_true", help="fewer runs, fewer rows")
    made.add_argument("--device", default="cuda:0", help="default cuda:0")
    made.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default bfloat16; float32 on cpu")
    made.add_argument("--shapes", choices=["real", "tiny"], default="real", help="tiny: a rehearsal")
    made.add_argument("--smollm2", type=Path, metavar="GGUF", help="SmolLM2-135M-Instruct, a file or a directory")
    made.add_argument("--profile", action="store_true", help="also write the costliest kernels of each single piece")
    made.add_argument("--limit-s", type=int, default=LIMIT_S, help=f"seconds for a section; default {LIMIT_S}")
    made.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results", help="for the results")
    made.add_argument("--name", default=f"gpu-{datetime.date.today()}", help="of the results' files")
    return made
