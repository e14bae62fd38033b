"""A model that fits one machine, many jobs, no speculation: against what the library offers for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from benchmarks.engine_run import Head, whole_relay
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.end_to_end import check_texts, requests_for
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.timing import synchronize
from benchmarks.gpu.uncut import dummy_model, greedy_config
from tasks.generation import GenerationRequest
from workers.engine.source import Part
from workers.engine.tensors import TORCH_DTYPES
from workers.head.drafters.none import NoDrafter
from workers.served import ServedModel
from workers.settings import HeadSettings

#: tokens of each job that warms up
WARM_TOKENS = 8
#: part of the device's free memory that the library's continuous batching may take for its cache
CACHE_PART = 0.5


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens a second, prefill included: all completion tokens / the time from prompts to texts."""

    name: str
    tokens_per_s: float | None
    note: str = ""


def whole_rows(bench: Bench) -> Iterator[Row]:
    """Our way, then the library's two, with the same weights, prompts and lengths; then the ratio that counts."""
    requests = requests_for(bench, bench.sizes.jobs)
    ours = []
    for graphs in (True, False):
        ours.append(_tried(f"shardq, {'graphs' if graphs else 'eager'}", _ours(bench, requests, graphs)))
        bench.clear()
    theirs = _library(bench, requests)
    bench.clear()
    for row in (*ours, *theirs):
        yield Row("whole", f"{_work(bench)}: {row.name}", row.tokens_per_s, "tokens/s", note=row.note)
    best, rival = _best(ours), _best(theirs)
    ratio = best.tokens_per_s / rival.tokens_per_s if best.tokens_per_s and rival.tokens_per_s else None
    yield Row("whole", f"{_work(bench)}: {best.name} over {rival.name}", ratio, "×", "≥ 2")


def whole_throughput(
    bench: Bench, requests: Sequence[GenerationRequest], *, graphs: bool, deterministic: bool = False
) -> float:
    """Tokens a second of `shardq head --whole`'s engine, without queue and fronts."""
    settings = HeadSettings(
        model=str(bench.model(bench.shapes.target)),
        whole=True,
        slots=len(requests),
        draft_length=0,
        drafter="none",
        dtype=bench.dtype,
        device=str(bench.device),
        graphs=graphs,
        deterministic=deterministic,
        load_format="dummy",
        max_length=bench.sizes.cache,
    )
    served = ServedModel.resolve(settings, Part.WHOLE)
    head, tail = served.load_whole(slots=settings.num_slots, max_query=settings.max_query)
    relay = whole_relay(served, tail)
    Head(served, head).run(_short(requests), settings, relay, NoDrafter())
    ran = Head(served, head).run(requests, settings, relay, NoDrafter())
    check_texts(requests, ran.texts)
    return ran.tokens_per_s


def _ours(bench: Bench, requests: Sequence[GenerationRequest], graphs: bool) -> Callable[[], float]:
    return lambda: whole_throughput(bench, requests, graphs=graphs)


def _library(bench: Bench, requests: Sequence[GenerationRequest]) -> list[_Run]:
    model = dummy_model(bench.model(bench.shapes.target), TORCH_DTYPES[bench.dtype], bench.device)
    ways: dict[str, Callable[[Any, Sequence[GenerationRequest]], list[tuple[int, ...]]]] = {
        "generate, one batch": _generate,
        "generate_batch": _generate_batch,
    }
    runs = [_tried(name, _timed(bench, model, requests, way)) for name, way in ways.items()]
    model.destroy_cached_continuous_batching_manager()
    return runs


def _timed(
    bench: Bench,
    model: Any,
    requests: Sequence[GenerationRequest],
    way: Callable[[Any, Sequence[GenerationRequest]], list[tuple[int, ...]]],
) -> Callable[[], float]:
    def measure() -> float:
        way(model, requests)  # the library sizes caches and graphs by what it is given first
        synchronize(bench.device)
        began = time.perf_counter()
        texts = way(model, requests)
        spent_s = time.perf_counter() - began
        check_texts(requests, texts)
        return sum(map(len, texts)) / spent_s

    return measure


@torch.inference_mode()
def _generate(model: Any, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    tokens = torch.tensor([request.prompt for request in requests], device=model.device)
    config = greedy_config(requests[0].max_tokens)
    output = model.generate(tokens, generation_config=config, attention_mask=torch.ones_like(tokens))
    return [tuple(text) for text in output[:, tokens.shape[1] :].tolist()]


def _generate_batch(model: Any, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """Its manager is kept, with cache and graphs: a second call is spared their making."""
    on_cpu = {"num_blocks": 16, "max_batch_tokens": 256}
    on_gpu = {"max_memory_percent": CACHE_PART}
    config = greedy_config(requests[0].max_tokens)
    config.eos_token_id = -1
    results = model.generate_batch(
        [list(request.prompt or ()) for request in requests],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**(on_gpu if model.device.type == "cuda" else on_cpu)),
        max_new_tokens=requests[0].max_tokens,
        persistent_manager=True,
    )
    return [tuple(result.generated_tokens) for result in results.values()]


def _tried(name: str, measure: Callable[[], float]) -> _Run:
    try:
        result = _Run(name, measure())
    except Exception as error:  # noqa: BLE001 the other ways shall be measured all the same
        return _Run(name, None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    say(f"{name}: {result.tokens_per_s:,.1f} tokens/s")
    return result


def _best(runs: Sequence[_Run]) -> _Run:
    return max(runs, key=lambda run: run.tokens_per_s or 0.0)


def _short(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    return [replace(request, max_tokens=WARM_TOKENS) for request in requests]


def _work(bench: Bench) -> str:
    return f"{bench.shapes.target.name}, {bench.sizes.jobs} × {bench.sizes.tokens} tokens"
