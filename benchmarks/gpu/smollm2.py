"""A real model and real text through the whole system, against `generate`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.pairs import prompt_reader
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.system import SystemConfig
from benchmarks.gpu.uncut import NEAR_TIE, reference, stored_model
from benchmarks.wan_prompts import chats
from tests.pair import tasks_for
from workers.engine.source import Part, resolve

#: positions of a slot
MAX_LENGTH = 512


def smollm2_rows(bench: Bench) -> Iterator[Row]:
    """Chats in float32 at a long round trip with shardq's defaults (n-gram drafts, lengths and lanes chosen by it)."""
    if bench.smollm2 is None:
        yield Row("smollm2", "SmolLM2-135M, real text", None, note="not given: --smollm2 GGUF", left_out=True)
        return
    model = resolve(str(bench.smollm2), Part.WHOLE).path
    sizes = bench.sizes
    requests = chats(sizes.jobs, sizes.compared_tokens)
    both = {"model": str(model), "device": str(bench.device), "dtype": "float32", "max_length": str(MAX_LENGTH)}
    config = SystemConfig(
        (*both.items(), ("slots", str(sizes.jobs))), (("drafter", "ngram"), ("fronts", str(sizes.fronts)))
    )
    system = bench.systems.get(config)
    system.reshape(sizes.rtt_ms)
    system.run(chats(sizes.jobs, 8))
    result = system.run(requests)
    work = f"SmolLM2-135M float32, {sizes.jobs} chats, RTT {sizes.rtt_ms:g} ms"
    note = f"{result.tokens_per_round:.2f} tokens per round (n-grams); {result.round_ms()}; {result.mbit_s:.1f} Mbit/s"
    yield Row("smollm2", work, result.tokens_per_s, "tokens/s", note=note)
    bench.systems.close()
    prompts = prompt_reader(model, MAX_LENGTH)
    uncut = stored_model(model, torch.float32, bench.device)
    same, near_ties = 0, 0
    for task, outcome in zip(tasks_for(requests), result.outcomes, strict=True):
        job = prompts.read(task)
        expected = reference(uncut, job.tokens, job.max_tokens, prompts.eos)
        same += expected.tokens == outcome.token_ids
        near_ties += expected.tokens != outcome.token_ids and expected.gap < NEAR_TIE
    say(f"{same} of {len(requests)} texts as generate's")
    note = f"of the others {near_ties} have two scores nearer than {NEAR_TIE}" if same < len(requests) else ""
    wanted = f"≥ {len(requests)}"
    yield Row("smollm2", f"{work}: as generate", float(same), f"of {len(requests)}", wanted, note=note)
