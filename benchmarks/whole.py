"""One process against a split pair on one machine, no speculation: `python -m benchmarks.whole`.

The pair talks over a Redis on this machine, without any delay: what is measured is what the second process, the codec
and the server cost where a model need not be cut. SmolLM2-135M on the CPU unless told otherwise; both ways write the
same texts, which is checked in float32.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_run import Head, Ran, whole_relay
from benchmarks.rig import tail_process
from benchmarks.wan_prompts import equal_jobs
from relay.embedded import EmbeddedRedis
from relay.streams import RedisRelay
from relay.transport import HeadRelay
from tests.models import smollm2_directory
from workers.engine.source import Part
from workers.head.drafters import make_drafter
from workers.served import ServedModel
from workers.settings import HeadSettings

#: longest prompt + completion of these jobs
MAX_LENGTH = 256
#: tokens a row brings at most, whole or split
MAX_QUERY = 256


def settings_for(model: Path, slots: int, *, whole: bool) -> HeadSettings:
    """A head's settings: shardq's defaults, no drafts."""
    return HeadSettings(
        model=str(model),
        head_id="bench",
        slots=slots,
        whole=whole,
        max_length=MAX_LENGTH,
        draft_length=0,
        drafter="none",
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """The head's half in this process, and the ways to both tails: the one here, and the one in its own process."""

    head: Head
    here: HeadRelay
    there: HeadRelay
    #: process id of the tail that is there
    tail: int

    def run(self, jobs: int, tokens: int, *, whole: bool) -> tuple[Ran, float]:
        """One run, and the CPU seconds that head and tail took for it."""
        model = self.head.served.directory
        drafter = make_drafter(
            "none", target=model, drafter=None, dtype="float32", device="cpu", slots=jobs, max_length=MAX_LENGTH
        )
        before = cpu_s(self.tail)
        relay = self.here if whole else self.there
        ran = self.head.run(equal_jobs(jobs, tokens), settings_for(model, jobs, whole=whole), relay, drafter)
        return ran, ran.cpu_s + cpu_s(self.tail) - before


@contextmanager
def pair(model: Path, slots: int) -> Iterator[Pair]:
    """Both ways to run a model, one of which is used at a time."""
    served = ServedModel.resolve(settings_for(model, slots, whole=True), Part.WHOLE)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedRedis(directory / "redis"))
        log = stack.enter_context((directory / "tail.log").open("w+"))
        pid = stack.enter_context(tail_process(model, server.url, slots, MAX_LENGTH, log))
        head, tail = served.load_whole(slots=slots, max_query=MAX_QUERY)
        relay = stack.enter_context(closing(RedisRelay(server.url)))
        yield Pair(Head(served, head), whole_relay(served, tail), relay, pid)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far (Linux; 0 elsewhere)."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def compare(both: Pair, jobs: int, tokens: int) -> bool:
    """Print two lines of the table; whether the texts are the same."""
    (split, split_cpu), (whole, whole_cpu) = (both.run(jobs, tokens, whole=way) for way in (False, True))
    same = split.texts == whole.texts
    print(f"| {jobs} | split | {split.tokens_per_s:.1f} | | {split.num_tokens / split_cpu:.1f} | | |")
    print(
        f"| {jobs} | whole | {whole.tokens_per_s:.1f} | {whole.tokens_per_s / split.tokens_per_s:.2f} "
        f"| {whole.num_tokens / whole_cpu:.1f} | {split_cpu / whole_cpu:.2f} | {same} |",
        flush=True,
    )
    return same


def main() -> int:
    """Print the table; status 1 if a text differs."""
    parser = argparse.ArgumentParser(description="Measure one process against a split pair.")
    parser.add_argument("--jobs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="of each job")
    parser.add_argument("--threads", type=int, default=1, help="of torch here (for the tail: OMP_NUM_THREADS)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print(f"SmolLM2-135M, float32, {arguments.tokens} tokens a job, no drafts, {arguments.threads} threads a process\n")
    print("| jobs | way | tokens/s | whole / split | tokens per CPU s, both halves | whole / split | same texts |")
    print("|---|---|---|---|---|---|---|")
    with pair(smollm2_directory(), max(arguments.jobs)) as both:
        for way in (False, True):
            both.run(2, 4, whole=way)
        same = [compare(both, jobs, arguments.tokens) for jobs in arguments.jobs]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
