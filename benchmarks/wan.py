"""What a long link costs, and what is left of it: `make bench-wan`, or `python -m benchmarks.wan --quick`.

Every row is a ratio, or a difference, of runs made right after each other on this machine: head and tail are real
processes, joined by the relay's Redis over two simulated links (`benchmarks.rig`). The tiny model has random weights
and next to no compute, SmolLM2-135M is the real small one. One thread per process, so that two cores are enough.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.rig import Result, Rig, Way, rig
from benchmarks.wan_prompts import chats, equal_jobs, with_system_prompt
from tasks.generation import GenerationRequest
from tests.models import smollm2_directory, tiny_model

#: where `--save` puts its files
RESULTS = Path(__file__).parent / "results"
#: the round trip that the targets are stated for, and the others
RTT_MS = 86.0
OTHER_RTTS_MS = (0.0, 20.0, 200.0)
#: most slots of the runs
SLOTS = 32
#: fixed draft lengths that one job at a time is measured with
FIXED_LENGTHS = (0, 4, 8)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table."""

    row: str
    what: str
    value: float
    unit: str = ""
    #: e.g. "≥ 14"; empty: no target of its own
    wanted: str = ""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value is as wanted; None without a target."""
        if not self.wanted:
            return None
        sign, _, bound = self.wanted.partition(" ")
        return self.value >= float(bound) if sign == "≥" else self.value <= float(bound)


class Bench:
    """The models' rigs, started when first needed; runs are made once and remembered."""

    def __init__(self, stack: ExitStack, *, quick: bool) -> None:
        self._stack = stack
        self.quick = quick
        self._rigs: dict[str, Rig] = {}
        self._results: dict[tuple[str, Way, tuple[GenerationRequest, ...]], Result] = {}

    def rig(self, model: str) -> Rig:
        """`model`: "bare" (two layers), "tiny" (four) or "smollm2"."""
        if model not in self._rigs:
            say(f"starting head and tail of {model}")
            self._rigs[model] = self._stack.enter_context(
                rig(self._directory(model), slots=SLOTS, max_length=256 if model == "smollm2" else 512)
            )
        return self._rigs[model]

    def _directory(self, model: str) -> Path:
        if model == "smollm2":
            return smollm2_directory()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return tiny_model(directory / model, layers=2 if model == "bare" else 4)

    def run(self, model: str, requests: Sequence[GenerationRequest], way: Way) -> Result:
        """The result of these jobs run this way."""
        key = (model, way, tuple(map(_hashable, requests)))
        if key not in self._results:
            self._results[key] = result = self.rig(model).run(requests, way)
            drafted = result.mean("tokens_per_round")
            per_round = "" if drafted is None else f", {drafted:.2f} tokens per round"
            say(f"{model}, {len(requests)} jobs, {_describe(way)}: {result.tokens_per_s:.1f} tokens/s{per_round}")
        return self._results[key]


def _hashable(request: GenerationRequest) -> GenerationRequest:
    # messages hold dicts: their text will do
    return request if request.messages is None else replace(request, messages=None, prompt=json.dumps(request.messages))


def _describe(way: Way) -> str:
    chosen = {name: value for name, value in asdict(way).items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


# -- the rows -------------------------------------------------------------------------------------------------------


def link_overhead(bench: Bench) -> list[Line]:
    """Round time less the round trip, one job whose rounds carry 4 drafts; then 64 KB a round over a thin link.

    The smallest model still computes for milliseconds. That part, as the job's figures have it, is shown apart; the
    round trip is the one that a PING takes over both legs.
    """
    rounds = 25 if bench.quick else 60
    lines = []
    for rtt_ms in (RTT_MS,) if bench.quick else (RTT_MS, *OTHER_RTTS_MS):
        way = Way(slots=1, rtt_ms=rtt_ms, drafter="sentinel", draft_length=4, lanes=1)
        late_ms = bench.rig("bare").lateness_ms(rtt_ms)
        result = bench.run("bare", equal_jobs(1, rounds + 4), way)
        metrics = result.outcomes[0].metrics
        assert metrics is not None
        computing_ms = 1000 * (metrics.draft_s + metrics.head_s + metrics.tail_s) / (metrics.rounds + 1)
        p50, p95 = (ms - rtt_ms - late_ms - computing_ms for ms in _round_ms(result))
        note = f"and {computing_ms:.1f} ms computing; the links take {late_ms:.1f} ms more than they should"
        targets = ("≤ 5", "≤ 10") if rtt_ms == RTT_MS else ("", "")
        lines += [
            Line("link overhead", f"round - RTT {rtt_ms:g}, p50", p50, "ms", targets[0], note),
            Line("link overhead", f"round - RTT {rtt_ms:g}, p95", p95, "ms", targets[1]),
        ]
    return [*lines, _payload(bench)]


def _payload(bench: Bench) -> Line:
    """32 rows of 11 tokens are 66 KB of the tiny models' hidden states."""
    rounds = 12 if bench.quick else 25
    way = Way(slots=SLOTS, rtt_ms=RTT_MS, drafter="sentinel", draft_length=10, lanes=1)
    jobs = equal_jobs(SLOTS, rounds + 10)
    free, thin = bench.run("bare", jobs, way), bench.run("bare", jobs, replace(way, mbit_s=50.0))
    more_ms = _round_ms(thin)[0] - _round_ms(free)[0]
    kb = max(tokens for _, tokens in thin.traffic.sent) * bench.rig("bare").bytes_per_token / 1000
    note = f"{kb:.1f} KB a round; on two hops at 50 Mbit/s they take {2 * kb * 8 / 50:.0f} ms"
    return Line("link overhead", "64 KB at 50 Mbit/s, more", more_ms, "ms", "≤ 25", note)


def _round_ms(result: Result) -> tuple[float, float]:
    """Median and 95th percentile of the time from one round's sending to the next's, where rows and drafts are full."""
    sent = result.traffic.sent
    full = max(tokens for _, tokens in sent)
    pairs = [(earlier, later) for (earlier, tokens), (later, _) in pairwise(sent) if tokens == full]
    times = sorted(1000 * (later - earlier) for earlier, later in pairs)
    return times[len(times) // 2], times[int(len(times) * 0.95)]


def interleaving(bench: Bench) -> list[Line]:
    """How many times the tokens/s of one job 16 jobs make, without speculation."""
    lines = []
    for rtt_ms in (RTT_MS,) if bench.quick else (20.0, RTT_MS, 200.0):
        way = Way(slots=16, rtt_ms=rtt_ms, drafter="none", draft_length=0)
        tokens = 24 if bench.quick else 40
        one, many = (bench.run("tiny", equal_jobs(num, tokens), way) for num in (1, 16))
        lines.append(
            Line(
                "interleaving",
                f"RTT {rtt_ms:g}, 16 jobs / 1 job",
                many.tokens_per_s / one.tokens_per_s,
                "×",
                "≥ 14" if rtt_ms == RTT_MS else "",
                f"{one.tokens_per_s:.1f} and {many.tokens_per_s:.1f} tokens/s",
            )
        )
    return lines


def utilisation(bench: Bench) -> list[Line]:
    """What is left of the throughput without a link, 32 jobs of the real model, shardq's defaults."""
    near = bench.run("smollm2", _real(bench, SLOTS), Way(slots=SLOTS, rtt_ms=0.0))
    lines = []
    for rtt_ms in (RTT_MS,) if bench.quick else (RTT_MS, 200.0):
        far = bench.run("smollm2", _real(bench, SLOTS), Way(slots=SLOTS, rtt_ms=rtt_ms))
        lines.append(
            Line(
                "utilisation",
                f"SmolLM2, 32 jobs, RTT {rtt_ms:g} / RTT 0",
                far.tokens_per_s / near.tokens_per_s,
                "×",
                "≥ 0.9" if rtt_ms == RTT_MS else "",
                f"{far.tokens_per_s:.1f} and {near.tokens_per_s:.1f} tokens/s; {_same(near, far)}",
            )
        )
    return lines


def prototype(bench: Bench) -> list[Line]:
    """One prompt at a time with a fixed draft length, against shardq's defaults."""
    lines = []
    for model, target in (("tiny", 10), ("smollm2", 7)):
        jobs = _real(bench, SLOTS) if model == "smollm2" else equal_jobs(SLOTS, 24 if bench.quick else 48)
        alone = jobs[: 1 if bench.quick else 2]
        fixed = {k: bench.run(model, alone, Way.one_at_a_time(RTT_MS, k)) for k in FIXED_LENGTHS}
        lines += [
            Line("prototype's method", f"{model}, one at a time, K={k}", run.tokens_per_s, "tokens/s")
            for k, run in fixed.items()
        ]
        ours = bench.run(model, alone, Way(slots=1, rtt_ms=RTT_MS))
        best = max(run.tokens_per_s for run in fixed.values())
        note = f"{ours.tokens_per_s:.1f} tokens/s; {_same(fixed[0], ours)}"
        lines.append(
            Line("prototype's method", f"{model}, 1 job / best fixed K", ours.tokens_per_s / best, "×", "≥ 0.95", note)
        )
        for num in (8, SLOTS):
            run = bench.run(model, jobs[:num], Way(slots=SLOTS, rtt_ms=RTT_MS))
            times = run.tokens_per_s / fixed[8].tokens_per_s
            wanted = f"≥ {target}" if num == SLOTS else ""
            note = f"{run.tokens_per_s:.1f} tokens/s"
            lines.append(Line("prototype's method", f"{model}, {num} jobs / K=8", times, "×", wanted, note))
    return lines


def wire_bytes(bench: Bench) -> list[Line]:
    """Bytes of decoding rounds per committed token, against frames that always carry 9 tokens a row."""
    jobs = _real(bench, SLOTS)
    fixed = bench.run("smollm2", jobs, Way(slots=SLOTS, rtt_ms=RTT_MS, drafter="ngram", draft_length=8))
    ours = bench.run("smollm2", jobs, Way(slots=SLOTS, rtt_ms=RTT_MS))
    unpacked = fixed.traffic.rounds.rows * 9 * bench.rig("smollm2").bytes_per_token + fixed.traffic.rounds.bytes_down
    sent = ours.traffic.rounds.bytes_up + ours.traffic.rounds.bytes_down
    per_token = [sent / _decoded(ours), unpacked / _decoded(fixed)]
    note = f"{per_token[0]:.0f} and {per_token[1]:.0f} bytes"
    return [Line("bytes per token", "packed, adaptive / K=8 unpacked", per_token[0] / per_token[1], "×", "≤ 0.6", note)]


def shared_prefix(bench: Bench) -> list[Line]:
    """Prefill of 32 jobs behind one system prompt of 300 tokens."""
    jobs = with_system_prompt(SLOTS, 8 if bench.quick else 16)
    way = Way(slots=SLOTS, rtt_ms=RTT_MS)
    reused = bench.run("tiny", jobs, way)
    anew = bench.run("tiny", jobs, replace(way, prefix_reuse=False))
    mine, all_of_it = reused.traffic.prefill, anew.traffic.prefill
    cached = reused.mean("cached_tokens") or 0.0
    same = sum(a != b for a, b in zip(reused.texts, anew.texts, strict=True))
    prompts = sum(outcome.prompt_tokens for outcome in anew.outcomes) / len(jobs)
    bytes_note = f"{prompts:.0f} tokens a prompt, {cached:.0f} of them cached"
    return [
        Line("shared prefix", "prefill bytes", mine.bytes_up / all_of_it.bytes_up, "×", "≤ 0.15", bytes_note),
        Line("shared prefix", "prefill tokens computed", mine.tokens / all_of_it.tokens, "×", "≤ 0.15"),
        Line("shared prefix", "prefill time at the tail", mine.tail_s / all_of_it.tail_s, "×"),
        Line("shared prefix", "texts that differ", same, "", "≤ 0"),
    ]


def growth(bench: Bench) -> list[Line]:
    """Time per job and memory as the line of jobs grows; ramp and drain left out.

    A short line is over in a second, so it is run several times: each length counts about as many jobs. Half of them
    run before the long line and half after it, so that a machine that grows slower or faster meanwhile favours none.
    """
    slots, repeats = 16, {32: 2, 64: 2, 256: 1} if bench.quick else {32: 24, 64: 8, 512: 1}
    way = Way(slots=slots, rtt_ms=20.0, drafter="none", draft_length=0)
    sizes, ready = list(repeats), bench.rig("tiny")
    ready.run(_ragged(sizes[1]), way)  # what is only slow the first time counts for none
    half = [num for num in sizes[:-1] for _ in range(repeats[num] // 2)]
    runs: dict[int, list[Result]] = {num: [] for num in sizes}
    for num in (*half, sizes[-1], *reversed(half)):
        runs[num].append(ready.run(_ragged(num), way))
    per_job = {num: fmean(_steady_s_per_job(run, slots) for run in some) for num, some in runs.items()}
    small, large = runs[sizes[1]][-1], runs[sizes[-1]][-1]
    note = ", ".join(f"{num} jobs: {1000 * s:.1f} ms" for num, s in per_job.items())
    spread = max(abs(s / fmean(per_job.values()) - 1) for s in per_job.values())
    cpu = [1000 * fmean(run.cpu_s for run in some) / num for num, some in runs.items()]
    return [
        Line("growth", "time per job, largest deviation", 100 * spread, "%", "≤ 5", note),
        Line("growth", "head's CPU time per job, last / second", cpu[-1] / cpu[1], "×", "", f"{cpu[-1]:.1f} ms"),
        Line("growth", "head's memory, more", large.head_mb - small.head_mb, "MB", "≤ 20", f"{large.head_mb:.0f} MB"),
        Line("growth", "Redis' memory, more", large.redis_mb - small.redis_mb, "MB", "≤ 2", f"{large.redis_mb:.1f} MB"),
        *_fairness(large, slots),
    ]


def _fairness(run: Result, slots: int) -> list[Line]:
    """Whether jobs get their slots in turn, and rows their rounds."""
    waits = sorted(run.record.started_s.values())[slots:]
    gaps = sorted(late - early for times in run.traffic.turns.values() for early, late in pairwise(times))
    usual = f"{1000 * fmean(gaps):.0f} ms mean, {1000 * gaps[-1]:.0f} ms longest of {len(gaps)}"
    return [
        Line("fairness", "jobs that started before an earlier one", _overtakings(run), "", "≤ 0"),
        Line("fairness", "a job's longest wait for its slot / mean", waits[-1] / fmean(waits), "×", "≤ 2"),
        Line("fairness", "a row's longest wait for its next round / mean", gaps[-1] / fmean(gaps), "×", "", usual),
    ]


def _overtakings(run: Result) -> int:
    """Jobs that got their slot before one that stood in front of them in the line."""
    started = [run.record.started_s[f"job{number}.1"] for number in range(len(run.outcomes))]
    return sum(later < earlier for earlier, later in pairwise(started))


def _ragged(num: int) -> list[GenerationRequest]:
    """Jobs of 8 to 16 tokens, so that they do not end in waves."""
    return [replace(request, max_tokens=8 + 7 * n % 9) for n, request in enumerate(equal_jobs(num, 16))]


def _steady_s_per_job(run: Result, slots: int) -> float:
    """Seconds per average job while every slot was taken and jobs still waited."""
    began = run.record.began
    starts = sorted(run.record.started_s.values())
    first, last = starts[slots - 1], starts[-1]
    tokens = sum(num for at, num in run.traffic.commits if first < at - began <= last)
    return (last - first) / (tokens / (run.num_tokens / len(run.outcomes)))


def _real(bench: Bench, num: int) -> list[GenerationRequest]:
    return chats(num, 16 if bench.quick else 64)


def _decoded(run: Result) -> int:
    """Tokens committed by rounds: prefill gives each job its first."""
    return run.num_tokens - len(run.outcomes)


def _same(one: Result, other: Result) -> str:
    pairs = list(zip(one.texts, other.texts, strict=False))
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} texts identical"


ROWS: dict[str, Callable[[Bench], list[Line]]] = {
    "overhead": link_overhead,
    "interleaving": interleaving,
    "prefix": shared_prefix,
    "growth": growth,
    "prototype": prototype,
    "utilisation": utilisation,
    "bytes": wire_bytes,
}

# -- output ---------------------------------------------------------------------------------------------------------


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    marks = {True: "yes", False: "**no**", None: ""}
    head = "| row | what | value | wanted | holds | |\n|---|---|---|---|---|---|\n"
    rows = [
        (line.row, line.what, f"{line.value:.3g} {line.unit}", line.wanted, marks[line.holds], line.note)
        for line in lines
    ]
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def machine() -> str:
    """What the results were measured on, fit for a file's name."""
    # a process may have been given fewer cores than the machine has
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()}-{platform.machine()}-{cores}cores".lower()


def save(lines: Sequence[Line], took_s: float, *, quick: bool) -> Path:
    """Write the table and the figures; returns the table's file."""
    RESULTS.mkdir(exist_ok=True)
    date = datetime.date.today().isoformat()
    path = RESULTS / f"{machine()}-{date}.md"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    mode = "python -m benchmarks.wan --quick" if quick else "make bench-wan"
    text = f"# `{mode}` on {machine()}, {date}\n\n{versions}, one thread per process; {took_s:.0f} s.\n\n{table(lines)}"
    path.write_text(text, encoding="utf-8")
    figures = [{**asdict(line), "holds": line.holds} for line in lines]
    path.with_suffix(".json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the rows, print the table; 1 if something is not as wanted."""
    parser = argparse.ArgumentParser(description="Measure what a long link costs.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer tokens and round trips: minutes instead of a quarter"
    )
    parser.add_argument("--only", action="append", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--save", action="store_true", help=f"write the results to {RESULTS.name}/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    lines: list[Line] = []
    with ExitStack() as stack:
        bench = Bench(stack, quick=arguments.quick)
        for name in arguments.only or ROWS:
            lines += ROWS[name](bench)
    print(table(lines))
    if arguments.save:
        print(save(lines, time.perf_counter() - started, quick=arguments.quick))
    return int(any(line.holds is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
