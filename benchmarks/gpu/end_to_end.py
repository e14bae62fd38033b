"""Head and tail in two processes an ocean apart: real shapes, dummy weights, replayed drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.batch import BatchResult
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.profiler import union_s
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.system import System, SystemConfig
from tasks.generation import GenerationRequest

#: tokens per round that the replayed drafts give: what the prototype's pair of models had
TOKENS_PER_ROUND = 4.07
#: jobs one after the other whose mean is the figure for one job
SINGLE_JOBS = 3
#: tokens of each job that warms up
WARM_TOKENS = 48
#: what the head's loop does with its device
HEAD_SPANS = frozenset({"draft", "head", "prefill"})


def end_to_end_rows(bench: Bench) -> Iterator[Row]:
    """One job and many, at a long round trip, then over a slow link."""
    yield from _timed(bench, "e2e", bench.shapes.target, (), single="≥ 38", many="≥ 2000", slow=True)


def nf4_rows(bench: Bench) -> Iterator[Row]:
    """The same with the large shape in NF4."""
    quantised = (("quantization", "nf4"),)
    yield from _timed(bench, "nf4", bench.shapes.large, quantised, single="≥ 25", many="", slow=False)


def idle_rows(bench: Bench) -> Iterator[Row]:
    """The device's idle share of the time in which head and tail are at work, many jobs at once.

    Head: kernels and copies of its process / the union of its draft, head and prefill spans on the trace. Tail: those
    of its process / the sum of the times that its verdicts tell. Kernels by torch's profiler.
    """
    system, _ = _ready(bench, bench.shapes.target, ())
    requests = requests_for(bench, bench.sizes.jobs)
    result, head, tail = system.watched(lambda: system.run(requests))
    at_work = {
        "head": union_s(system.spans(HEAD_SPANS, result.began, result.ended)),
        "tail": sum(end - start for start, end in system.spans(frozenset({"tail"}), result.began, result.ended)),
    }
    for part, busy in (("head", head), ("tail", tail)):
        share = 100 * (1 - busy.busy_s / at_work[part])
        note = (
            f"at work {at_work[part]:.2f} s of {result.wall_s:.2f} s, device busy {busy.busy_s:.2f} s, "
            f"{100 * busy.short_gaps_s / at_work[part]:.0f} % of it between one kernel and the next, "
            f"{busy.num_kernels} kernels; {result.tokens_per_s:,.0f} tokens/s under the profiler; {_devices(bench)[1]}"
        )
        measured = share if bench.device.type == "cuda" else None
        yield Row("idle", f"{part}, {bench.sizes.jobs} jobs", measured, "%", "≤ 25", note=note)


def _timed(
    bench: Bench,
    section: str,
    shape: Shape,
    extra: tuple[tuple[str, str], ...],
    *,
    single: str,
    many: str,
    slow: bool,
) -> Iterator[Row]:
    sizes = bench.sizes
    system, where = _ready(bench, shape, extra)
    name = _pair(bench, shape)
    runs = [system.run(requests_for(bench, 1, first=n)) for n in range(SINGLE_JOBS)]
    rate = sum(run.tokens_per_s for run in runs) / len(runs)
    note = f"mean of {len(runs)}; decoding alone {sum(run.mean('decode_tps') for run in runs) / len(runs):.1f}; "
    yield Row(section, f"{name}, 1 job", rate, "tokens/s", single, note=f"{note}{_figures(runs[-1])}; {where}")
    yield from _many(bench, system, section, name, many, where)
    longer = [replace(request, max_tokens=2 * sizes.tokens) for request in requests_for(bench, sizes.jobs)]
    result = system.run(longer)
    check_texts(longer, [outcome.token_ids for outcome in result.outcomes])
    work = f"{name}, {sizes.jobs} jobs of {2 * sizes.tokens} tokens"
    yield Row(section, work, result.tokens_per_s, "tokens/s", many, note=_figures(result))
    queued = system.run(requests_for(bench, sizes.queued))
    work = f"{name}, {sizes.queued} jobs in {sizes.jobs} slots"
    yield Row(section, work, queued.tokens_per_s, "tokens/s", note=_figures(queued))
    if not slow:
        return
    system.reshape(sizes.rtt_ms, sizes.mbit_s)
    slow_name = f"{name}, {sizes.mbit_s:g} Mbit/s"
    result = system.run(requests_for(bench, 1))
    yield Row(section, f"{slow_name}, 1 job", result.tokens_per_s, "tokens/s", note=_figures(result))
    yield from _many(bench, system, section, slow_name, "", where)


def auto_rows(bench: Bench) -> Iterator[Row]:
    """Many jobs with the default `--draft-length auto`, which goes by measured acceptance and cost."""
    if bench.quick:
        yield Row("auto", "draft lengths chosen", None, note="left out by --quick", left_out=True)
        return
    shape = bench.shapes.target
    system, where = _ready(bench, shape, (), draft_length="auto")
    for mbit_s in (None, bench.sizes.mbit_s):
        system.reshape(bench.sizes.rtt_ms, mbit_s)
        link = "" if mbit_s is None else f", {mbit_s:g} Mbit/s"
        yield from _many(bench, system, "auto", f"{_pair(bench, shape)}{link}, draft length auto", "", where)


def _many(bench: Bench, system: System, section: str, name: str, wanted: str, where: str) -> Iterator[Row]:
    """Many jobs at once, twice unless the link is slow: the mean of both runs."""
    requests = requests_for(bench, bench.sizes.jobs)
    runs = [system.run(requests) for _ in range(1 if bench.quick or "Mbit" in name else 2)]
    for run in runs:
        check_texts(requests, [outcome.token_ids for outcome in run.outcomes])
    last, name = runs[-1], f"{name}, {bench.sizes.jobs} jobs"
    rates = " and ".join(f"{run.tokens_per_s:,.0f}" for run in runs)
    note = f"runs: {rates}; last one first token to last {last.decoding_tokens_per_s:,.0f}; {_figures(last)}; {where}"
    yield Row(section, name, sum(run.tokens_per_s for run in runs) / len(runs), "tokens/s", wanted, note=note)
    yield Row(section, f"{name}: on the wire", last.mbit_s, "Mbit/s", note=f"{last.gb_per_hour:.1f} GB an hour")


def _pair(bench: Bench, shape: Shape) -> str:
    return f"{shape.name} + {bench.shapes.drafter.name}, RTT {bench.sizes.rtt_ms:g} ms"


def _ready(
    bench: Bench, shape: Shape, extra: tuple[tuple[str, str], ...], draft_length: str | None = None
) -> tuple[System, str]:
    """The system at its distance, warmed up, and on what it runs."""
    config, where = system_config(bench, shape, extra, draft_length or str(bench.sizes.draft))
    fresh = not bench.systems.runs(config)
    system = bench.systems.get(config)
    system.reshape(bench.sizes.rtt_ms)
    if fresh:
        for num in (1, bench.sizes.jobs, bench.sizes.jobs):
            warm = system.run([replace(r, max_tokens=WARM_TOKENS) for r in requests_for(bench, num)])
            say(f"warming up with {num} jobs: {warm.tokens_per_s:,.0f} tokens/s")
    return system, where


def system_config(
    bench: Bench, shape: Shape, extra: tuple[tuple[str, str], ...], draft_length: str
) -> tuple[SystemConfig, str]:
    """Head and tail with dummy weights and replayed drafts, and on which devices."""
    (head, tail), where = _devices(bench)
    both = {
        "model": str(bench.model(shape)),
        "load_format": "dummy",
        "dtype": bench.dtype,
        "max_length": str(bench.sizes.cache),
        "slots": str(bench.sizes.jobs),
        **dict(extra),
    }
    own = {
        "device": head,
        "drafter": "model",
        "drafter_model": str(bench.model(bench.shapes.drafter)),
        "draft_length": draft_length,
        "fronts": str(bench.sizes.fronts),
        "bench_tokens_per_round": str(TOKENS_PER_ROUND),
        "bench_replayed_length": str(bench.sizes.draft),
    }
    return SystemConfig(tuple(both.items()), tuple(own.items()), (("device", tail),)), where


def _devices(bench: Bench) -> tuple[tuple[str, str], str]:
    """Devices of head and tail, and how to say that."""
    if bench.device.type == "cuda" and torch.cuda.device_count() > 1:
        return ("cuda:0", "cuda:1"), "a GPU each"
    return (str(bench.device), str(bench.device)), f"both on one {'GPU' if bench.device.type == 'cuda' else 'CPU'}"


def requests_for(bench: Bench, num: int, first: int = 0) -> list[GenerationRequest]:
    """Jobs of equal size whose prompts begin differently: no prefix is worth copying."""
    sizes = bench.sizes
    return [
        GenerationRequest(
            tuple((number * 37 + place * (number % 11 + 1)) % 250 for place in range(sizes.prompt)),
            None,
            seed=number,
            max_tokens=sizes.tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        for number in range(first, first + num)
    ]


def check_texts(requests: Sequence[GenerationRequest], texts: Sequence[Sequence[int]]) -> None:
    """RuntimeError unless every text is the one that dummy weights say."""
    for request, text in zip(requests, texts, strict=True):
        last = (request.prompt or (0,))[-1]
        if list(text) != [int(last) + 1 + place for place in range(request.max_tokens)]:
            raise RuntimeError(f"a text is wrong: after {last} came {list(text[:20])}")


def _figures(result: BatchResult) -> str:
    per_round = f"{result.tokens_per_round:.2f} tokens per round (replayed)"
    return f"{per_round}; {result.round_ms()}"
