"""P4: a job whose logits are not finite fails alone, and leaves nothing behind in its slot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.generation import FailureType, GenerationRequest, StopReason
from tests.models import tiny_model
from tests.pair import Halves, Line, Outcomes, UncutModel, generate, options, session, tasks_for
from tests.parity import MIN_GAP
from workers.head.drafters import make_drafter
from workers.head.engine import HeadEngine

#: a prompt with this character meets an embedding that is no number
POISON = "~"


@pytest.fixture
def poisoned(tmp_path: Path) -> Halves:
    directory = tiny_model(tmp_path / "model", "llama")
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    halves = Halves.load(directory, 2, slots=4, max_length=128)
    (token,) = halves.prompts.tokenizer(POISON)["input_ids"]
    tensors["model.embed_tokens.weight"][token] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    return Halves.load(directory, 2, slots=4, max_length=128)


@pytest.mark.parametrize(("concurrency", "whole"), [(1, False), (3, False), (3, True)])
def test_jobs_beside_and_after_one_with_nan_logits_get_their_own_text(
    poisoned: Halves, concurrency: int, whole: bool
) -> None:
    texts = ["good morning", f"bad {POISON} number", "good evening", f"{POISON}", "good night", "and so on"]
    requests = [GenerationRequest(text, None, 0, 16, temperature=0.0) for text in texts]
    drafter = make_drafter(
        "ngram", target=poisoned.directory, drafter=None, dtype="float32", device="cpu", slots=4, max_length=128
    )
    outcomes = generate(poisoned, tasks_for(requests), drafter, draft_length=4, concurrency=concurrency, whole=whole)
    uncut = UncutModel(poisoned.directory, poisoned.prompts)
    for text, task, outcome in zip(texts, tasks_for(requests), outcomes, strict=True):
        if POISON in text:
            assert outcome.failure is FailureType.NON_FINITE
            assert outcome.token_ids == ()
        else:
            reference = uncut.answer(task)
            assert reference.gap > MIN_GAP
            assert outcome.token_ids == reference.tokens


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_a_job_stopped_in_its_prefill_leaves_no_such_numbers_to_the_next_one(poisoned: Halves, num_turns: int) -> None:
    texts = [f"{POISON} and a long, long prompt behind it", "good morning"]
    tasks = tasks_for([GenerationRequest(text, None, 0, 16, temperature=0.0) for text in texts])
    bad, good = (poisoned.prompts.read(task) for task in tasks)
    drafter = make_drafter(
        "none", target=poisoned.directory, drafter=None, dtype="float32", device="cpu", slots=1, max_length=128
    )
    line, outcomes = Line([bad]), Outcomes()
    engine = HeadEngine(poisoned.head, drafter, line, outcomes, options(slots=1, lanes=1, prefill_chunk=4))
    with session(poisoned, 1, 1) as courier:
        engine.open(courier)
        for _ in range(num_turns):
            engine.step()
        engine.stop(bad.task_id, StopReason.CANCELLED)
        line.append(good)
        while len(outcomes.finished) < 2:
            engine.step()
    first, second = (outcomes.finished[task.task_id] for task in tasks)
    assert first.stopped is StopReason.CANCELLED or first.failure is FailureType.NON_FINITE
    reference = UncutModel(poisoned.directory, poisoned.prompts).answer(tasks[1])
    assert reference.gap > MIN_GAP
    assert second.token_ids == reference.tokens
