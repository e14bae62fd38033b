"""Whether graphs change texts: the same jobs with them, without them, and through the uncut model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.pairs import halves, prompt_reader, run
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.uncut import NEAR_TIE, Reference, reference, stored_model
from benchmarks.wan_prompts import chats
from tasks.generation import GenerationRequest
from tests.pair import tasks_for
from workers.engine.source import Part, resolve
from workers.engine.tensors import TORCH_DTYPES

#: drafted tokens of the speculative runs
DRAFTED = 4
#: positions of a slot
MAX_LENGTH = 256

Texts = list[tuple[int, ...]]


def equality_rows(bench: Bench) -> Iterator[Row]:
    """Greedy texts in float32 and in the benchmark's own dtype: how many are the same."""
    model = real_or_random(bench)
    requests = [replace(r, ignore_eos=True) for r in chats(bench.sizes.compared, bench.sizes.compared_tokens)]
    for dtype in dict.fromkeys(("float32", bench.dtype, "bfloat16")):
        yield from _compared(bench, model, requests, dtype)
        bench.clear()


def real_or_random(bench: Bench) -> Path:
    """SmolLM2 if it was given, else a model of the drafter's shape whose texts vary from prompt to prompt."""
    if bench.smollm2 is not None:
        return resolve(str(bench.smollm2), Part.WHOLE).path
    return _random_model(bench)


def _random_model(bench: Bench) -> Path:
    """Large weights, and random signs in the final norm: else tied embeddings repeat their input for ever."""
    path = bench.directory / "random"
    if path.exists():
        return path
    bench.shapes.drafter.write(bench.directory).rename(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(bench.shapes.drafter.config(), dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("model.norm.weight"):
                parameter.copy_(torch.randn(parameter.shape).sign())
            elif parameter.dim() > 1:
                parameter.normal_(std=1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


def _compared(bench: Bench, model: Path, requests: Sequence[GenerationRequest], dtype: str) -> Iterator[Row]:
    expected = _references(bench, model, requests, dtype)
    eager = _texts(bench, model, requests, dtype, graphs=False)
    name = model.name.partition(".")[0] if bench.smollm2 else f"{bench.shapes.drafter.name} random"
    work = f"{name}, {dtype}, {bench.sizes.compared_tokens} tokens"
    wanted = f"≥ {len(requests)}" if dtype == "float32" else ""
    unit = f"of {len(requests)}"
    uncut = [reference.tokens for reference in expected]
    gap = min(reference.gap for reference in expected)
    note = f"smallest gap between two scores {gap:.1e}" + (", a near tie" if gap < NEAR_TIE else "")
    yield Row("equality", f"{work}: eager = generate", same_texts(eager[0], uncut), unit, note=note)
    yield Row("equality", f"{work}: eager, K={DRAFTED} = K=0", same_texts(eager[DRAFTED], eager[0]), unit, wanted)
    graphed = _texts(bench, model, requests, dtype, graphs=True)
    for length in (0, DRAFTED):
        same = same_texts(graphed[length], eager[length])
        yield Row("equality", f"{work}: graphs = eager, K={length}", same, unit, wanted)
    yield Row("equality", f"{work}: graphs, K={DRAFTED} = K=0", same_texts(graphed[DRAFTED], graphed[0]), unit, wanted)


def _texts(
    bench: Bench, model: Path, requests: Sequence[GenerationRequest], dtype: str, *, graphs: bool
) -> dict[int, Texts]:
    """The texts by draft length."""
    pair = halves(bench, model, graphs=graphs, slots=len(requests), max_length=MAX_LENGTH, dtype=dtype)
    texts = {}
    for length in (0, DRAFTED):
        outcomes = run(pair, requests, draft_length=length, wire_dtype=dtype)
        texts[length] = [outcome.token_ids for outcome in outcomes]
        say(f"texts in {dtype}, K={length}, {'graphs' if graphs else 'eager'}")
    return texts


def _references(bench: Bench, model: Path, requests: Sequence[GenerationRequest], dtype: str) -> list[Reference]:
    uncut, prompts = stored_model(model, TORCH_DTYPES[dtype], bench.device), prompt_reader(model, MAX_LENGTH)
    jobs = [prompts.read(task) for task in tasks_for(requests)]
    return [reference(uncut, job.tokens, job.max_tokens, ()) for job in jobs]


def same_texts(texts: Texts, others: Texts) -> float:
    """How many are the same."""
    return float(sum(text == other for text, other in zip(texts, others, strict=True)))
