"""Head and tail in this process, joined by the in-memory relay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from tasks.generation import GenerationRequest, Outcome
from tests.pair import MAX_QUERY, Halves, generate, tasks_for
from workers.engine.loader import load_config, load_head, load_tail
from workers.engine.tokenizer import end_ids, load_tokenizer
from workers.head.drafters import Drafter
from workers.head.drafters.ngram import NgramDrafter
from workers.head.drafters.none import NoDrafter
from workers.head.prompts import PromptReader


def prompt_reader(model: Path, context: int) -> PromptReader:
    """What makes jobs of requests for this model."""
    tokenizer = load_tokenizer(model)
    return PromptReader(
        tokenizer=tokenizer,
        eos=end_ids(model, tokenizer),
        vocab_size=load_config(model).vocab_size,
        context=context,
    )


def halves(bench: Bench, model: Path, *, graphs: bool, slots: int, max_length: int, **arguments: Any) -> Halves:
    """Both halves of a model on the device, cut in the middle."""
    split = load_config(model).num_hidden_layers // 2
    given = {"slots": slots, "max_length": max_length, "max_query": MAX_QUERY, **arguments}
    head = bench.load(load_head, model, split, graphs=graphs, **given)
    tail = bench.load(load_tail, model, split, graphs=graphs, **given)
    return Halves(model, head, tail, prompt_reader(model, max_length))


def run(
    pair: Halves,
    requests: Sequence[GenerationRequest],
    *,
    draft_length: int,
    wire_dtype: str,
    chunk: int = MAX_QUERY,
    slots: int | None = None,
) -> list[Outcome]:
    """All requests, with n-gram drafts of up to so many tokens, at once or `slots` at a time.

    `chunk`: most tokens of a prefill's frame. RuntimeError if a job fails.
    """
    drafter: Drafter = NgramDrafter() if draft_length else NoDrafter()
    outcomes = generate(
        pair,
        tasks_for(requests),
        drafter,
        draft_length=draft_length,
        concurrency=slots or len(requests),
        prefill_chunk=chunk,
        wire_dtype=wire_dtype,
    )
    failed = [outcome.failure_message for outcome in outcomes if outcome.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} jobs failed: {failed[0]}")
    return outcomes
