"""`python -m benchmarks.gpu`: all sections in one call, the table last."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.bench import REAL_SIZES, TINY_SIZES, Bench
from benchmarks.gpu.end_to_end import auto_rows, end_to_end_rows, idle_rows, nf4_rows
from benchmarks.gpu.equality import equality_rows
from benchmarks.gpu.micro import draft_rows, head_rows, tail_rows
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row, table, write
from benchmarks.gpu.shapes import REAL, TINY
from benchmarks.gpu.smollm2 import smollm2_rows
from benchmarks.gpu.system import Systems
from benchmarks.gpu.timing import QUICK, REHEARSAL, THOROUGH
from benchmarks.gpu.uncut import quieten
from benchmarks.gpu.whole import whole_rows

#: in the order in which they run: those that need the device alone first
SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "draft": draft_rows,
    "head": head_rows,
    "tail": tail_rows,
    "equality": equality_rows,
    "whole": whole_rows,
    "e2e": end_to_end_rows,
    "idle": idle_rows,
    "auto": auto_rows,
    "nf4": nf4_rows,
    "smollm2": smollm2_rows,
}
#: those that may go on with the system of the one before
ON_SYSTEMS = frozenset({"e2e", "idle", "auto", "nf4"})
#: seconds that a section may take
LIMIT_S = 300
VERSIONS = ("torch", "transformers", "triton", "bitsandbytes")


class TooLong(Exception):
    """A section did not end in its time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; 1 if a row is not as wanted."""
    options = _parser().parse_args(arguments)
    quieten()
    heading = _heading(options)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        bench = _bench(options, Path(directory))
        try:
            for section in options.only or SECTIONS:
                say(f"section {section}")
                rows += _section(bench, section, options.limit_s)
                write(options.out, options.name, heading, rows)
        finally:
            bench.systems.close()
            _keep_logs(Path(directory), options.out)
    print("\n".join([*heading, "", table(rows)]), flush=True)
    return int(any(row.holds is False for row in rows))


def _section(bench: Bench, section: str, limit_s: int) -> list[Row]:
    """The section's rows; what ends it early stands in the last one."""
    if section not in ON_SYSTEMS:
        bench.systems.close()
    rows: list[Row] = []
    try:
        with _limited(limit_s):
            for row in SECTIONS[section](bench):
                if bench.shapes is TINY:  # a rehearsal misses no target
                    row = replace(row, wanted="")
                say(row.line())
                rows.append(row)
    except Exception as error:  # noqa: BLE001 the other sections shall run all the same
        say(traceback.format_exc())
        text = " ".join(str(error).split())[:300].replace("|", "/")
        rows.append(Row(section, "ended early", None, note=f"{type(error).__name__}: {text}"))
        bench.systems.close()
    bench.clear()
    return rows


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TooLong in this thread after so many seconds."""

    def over(number: int, frame: object) -> None:
        raise TooLong(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _bench(options: argparse.Namespace, directory: Path) -> Bench:
    device = torch.device(options.device)
    tiny = options.shapes == "tiny"
    return Bench(
        device=device,
        dtype=options.dtype or ("bfloat16" if device.type == "cuda" else "float32"),
        shapes=TINY if tiny else REAL,
        sizes=TINY_SIZES if tiny else REAL_SIZES,
        effort=REHEARSAL if tiny else QUICK if options.quick else THOROUGH,
        directory=directory,
        systems=Systems(directory / "systems"),
        out=options.out,
        smollm2=options.smollm2,
        quick=options.quick,
        profile=options.profile,
    )


def _heading(options: argparse.Namespace) -> list[str]:
    device = torch.device(options.device)
    machine = f"{platform.machine()}, {platform.system()} {platform.release()}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpus = f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        machine = f"{gpus}, CUDA {torch.version.cuda}, {machine}"
    versions = [f"{name} {_version(name)}" for name in VERSIONS]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    chosen = " ".join(sys.argv[1:])
    return [f"{machine}", f"Python {platform.python_version()}, {', '.join(versions)}", f"{date}; arguments: {chosen}"]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def _keep_logs(directory: Path, out: Path) -> None:
    """All processes' logs in one file beside the results."""
    logs = sorted(directory.glob("systems/*/processes.log"))
    if logs:
        out.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"== {log.parent.name}\n{log.read_text(encoding='utf-8')}" for log in logs)
        (out / "gpu-processes.log").write_text(text, encoding="utf-8")


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [section for section in chosen if section not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SECTIONS)}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure the GPU's work.")
    parser.add_argument("--only", type=_sections, metavar="SECTION,…", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="fewer runs, fewer end-to-end rows")
    parser.add_argument("--device", default="cuda:0", help="default cuda:0")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default bfloat16; float32 on cpu")
    parser.add_argument("--shapes", choices=["real", "tiny"], default="real", help="tiny: a rehearsal")
    parser.add_argument("--smollm2", type=Path, metavar="GGUF", help="SmolLM2-135M-Instruct, a file or a directory")
    parser.add_argument("--profile", action="store_true", help="also write the costliest kernels of each single piece")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, help=f"seconds for a section; default {LIMIT_S}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results", help="for the results")
    parser.add_argument("--name", default=f"gpu-{datetime.date.today()}", help="of the results' files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
