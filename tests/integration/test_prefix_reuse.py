"""A shared prefix is sent and computed once; the texts are those that every job would have had alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.generation import GenerationRequest, Outcome
from tests.models import tiny_model
from tests.pair import Halves, UncutModel, generate, tasks_for
from tests.parity import MIN_GAP
from workers.head.drafters import make_drafter
from workers.head.prefixes import MIN_WAIT

#: about 300 tokens of the byte-level tokenizer
SYSTEM = "You are a patient assistant. " * 10
SLOTS = 8


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return Halves.load(tiny_model(tmp_path_factory.mktemp("model"), "llama"), 2, slots=SLOTS, max_length=512)


@pytest.fixture(scope="module")
def uncut(halves: Halves) -> UncutModel:
    return UncutModel(halves.directory, halves.prompts)


def requests(count: int, system: str = SYSTEM) -> list[GenerationRequest]:
    """Jobs with one system prompt and own parts of up to 30 tokens, greedy and sampled."""
    made = [
        GenerationRequest(f"{system}Question {number}: {'why' * (number % 4)}?", None, number, 12, temperature=0.0)
        for number in range(count)
    ]
    return [replace(request, temperature=0.8) if request.seed % 2 else request for request in made]


def run(
    halves: Halves, jobs: list[GenerationRequest], *, reuse: bool, drafter: str = "ngram", concurrency: int = SLOTS
) -> list[Outcome]:
    directory = halves.directory
    made = make_drafter(
        drafter,  # type: ignore[arg-type]
        target=directory,
        drafter=directory if drafter == "model" else None,
        dtype="float32",
        device="cpu",
        slots=SLOTS,
        max_length=512,
    )
    outcomes = generate(
        halves, tasks_for(jobs), made, draft_length="auto", concurrency=concurrency, lanes="auto", prefix_reuse=reuse
    )
    assert all(outcome.failure is None for outcome in outcomes)
    return outcomes


def cached(outcomes: list[Outcome]) -> list[int]:
    return [outcome.metrics.cached_tokens for outcome in outcomes if outcome.metrics is not None]


def bytes_up(outcomes: list[Outcome]) -> int:
    return sum(outcome.metrics.wire_bytes_up for outcome in outcomes if outcome.metrics is not None)


def test_a_shared_prefix_is_copied_and_the_texts_are_the_uncut_models(halves: Halves, uncut: UncutModel) -> None:
    jobs = requests(20)
    references = [uncut.answer(task) for task in tasks_for(jobs)]
    with_reuse, without = run(halves, jobs, reuse=True), run(halves, jobs, reuse=False)
    fair = [number for number, reference in enumerate(references) if reference.gap > MIN_GAP]
    assert len(fair) >= 15
    for number in fair:
        assert with_reuse[number].token_ids == without[number].token_ids == references[number].tokens
    assert cached(without) == [0] * 20
    assert cached(with_reuse)[0] == 0
    assert min(cached(with_reuse)[1:]) >= 280
    prefilled = sum(
        outcome.prompt_tokens - count for outcome, count in zip(with_reuse, cached(with_reuse), strict=True)
    )
    assert prefilled <= 0.15 * sum(outcome.prompt_tokens for outcome in without)
    assert bytes_up(with_reuse) < 0.5 * bytes_up(without)


def test_a_model_drafter_that_is_the_target_is_always_right_on_copied_prefixes(halves: Halves) -> None:
    outcomes = run(halves, requests(12), reuse=True, drafter="model")
    metrics = [outcome.metrics for outcome in outcomes if outcome.metrics is not None]
    assert sum(each.drafted for each in metrics) > 0
    # drafter and halves differ in how their prefills were cut: a near tie may fall either way
    assert sum(each.accepted for each in metrics) >= 0.97 * sum(each.drafted for each in metrics)


def test_two_batches_with_prompts_of_their_own_keep_their_prefixes_apart(halves: Halves, uncut: UncutModel) -> None:
    other = "Answer in verse, and be brief about it. " * 7
    jobs = [job for pair in zip(requests(8), requests(8, other), strict=True) for job in pair]
    references = [uncut.answer(task) for task in tasks_for(jobs)]
    outcomes = run(halves, jobs, reuse=True)
    for outcome, reference in zip(outcomes, references, strict=True):
        if reference.gap > MIN_GAP:
            assert outcome.token_ids == reference.tokens
    assert sum(count > 200 for count in cached(outcomes)) >= 14


def test_the_same_prompt_again_is_computed_but_for_its_last_token(halves: Halves) -> None:
    job = requests(1)[0]
    first, *others = run(halves, [job] * 4, reuse=True, concurrency=1)
    assert all(other.token_ids == first.token_ids for other in others)
    assert cached(others) == [first.prompt_tokens - 1] * 3


def test_the_same_prompt_at_the_same_time_waits_while_that_saves_enough(halves: Halves) -> None:
    job = requests(1)[0]
    first, *others = run(halves, [job] * 4, reuse=True)
    assert all(other.token_ids == first.token_ids for other in others)
    assert min(cached(others)) > first.prompt_tokens - 1 - MIN_WAIT
