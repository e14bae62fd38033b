"""`--deterministic` in half precision: what it costs, and that a text hangs on nothing but its own job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.end_to_end import requests_for
from benchmarks.gpu.equality import DRAFTED, MAX_LENGTH, Texts, real_or_random, same_texts
from benchmarks.gpu.pairs import halves, run
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.whole import whole_throughput
from benchmarks.wan_prompts import chats
from tasks.generation import GenerationRequest
from tests.pair import MAX_QUERY, Halves, tasks_for

DTYPE = "bfloat16"


def exact_rows(bench: Bench) -> Iterator[Row]:
    """Texts under changed circumstances, with and without the mode; then its pace."""
    model = real_or_random(bench)
    requests = [replace(r, ignore_eos=True) for r in chats(bench.sizes.compared, bench.sizes.compared_tokens)]
    name = model.name.partition(".")[0] if bench.smollm2 else f"{bench.shapes.drafter.name} random"
    for exact in (True, False):
        pair = halves(bench, model, graphs=True, slots=len(requests), max_length=MAX_LENGTH, dtype=DTYPE, exact=exact)
        way = "--deterministic" if exact else "without"
        for change, same in _changes(pair, requests):
            say(f"{way}, {change}: {same:g} of {len(requests)}")
            wanted = f"≥ {len(requests)}" if exact else ""
            work = f"{name}, {DTYPE}, {bench.sizes.compared_tokens} tokens, {way}: {change}"
            yield Row("exact", work, same, f"of {len(requests)}", wanted)
        del pair
        bench.clear()
    yield from _cost(bench)


def _changes(pair: Halves, requests: Sequence[GenerationRequest]) -> Iterator[tuple[str, float]]:
    """What is changed, and how many texts stay those of all jobs at once without drafts."""
    together = _texts(pair, requests)
    yield "all at once, again", same_texts(_texts(pair, requests), together)
    yield f"K={DRAFTED}", same_texts(_texts(pair, requests, drafted=DRAFTED), together)
    yield "one at a time", same_texts([_texts(pair, [request])[0] for request in requests], together)
    yield "chunks of a quarter's size", same_texts(_texts(pair, requests, chunk=MAX_QUERY // 4), together)
    yield "in line for four slots", same_texts(_texts(pair, requests, slots=4, drafted=DRAFTED), together)
    half = requests[0].max_tokens // 2
    begun = [_after(pair, request, text[:half]) for request, text in zip(requests, together, strict=True)]
    ends = _texts(pair, begun, drafted=DRAFTED)
    resumed = [(*text[:half], *end) for text, end in zip(together, ends, strict=True)]
    yield f"prefilled again after {half} tokens", same_texts(resumed, together)


def _after(pair: Halves, request: GenerationRequest, text: tuple[int, ...]) -> GenerationRequest:
    """What is left of a job when so much of its text is there."""
    (task,) = tasks_for([request])
    prompt = (*pair.prompts.read(task).tokens, *text)
    return replace(request, prompt=prompt, messages=None, max_tokens=request.max_tokens - len(text))


def _texts(
    pair: Halves,
    requests: Sequence[GenerationRequest],
    *,
    drafted: int = 0,
    chunk: int = MAX_QUERY,
    slots: int | None = None,
) -> Texts:
    outcomes = run(pair, requests, draft_length=drafted, wire_dtype=DTYPE, chunk=chunk, slots=slots)
    return [outcome.token_ids for outcome in outcomes]


def _cost(bench: Bench) -> Iterator[Row]:
    """The whole model's pace with many jobs, in the same process."""
    requests = requests_for(bench, bench.sizes.jobs)
    rates = {}
    for exact in (False, True):
        rates[exact] = whole_throughput(bench, requests, graphs=True, deterministic=exact)
        bench.clear()
        way = "--deterministic" if exact else "without"
        work = f"{bench.shapes.target.name} whole, {bench.sizes.jobs} × {bench.sizes.tokens} tokens, {way}"
        yield Row("exact", work, rates[exact], "tokens/s")
    yield Row("exact", "its pace over the usual one", rates[True] / rates[False], "×")
