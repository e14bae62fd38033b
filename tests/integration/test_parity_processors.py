"""P1 with processors: a text is what `generate` gives on the uncut model with the library's own processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from tasks.generation import GenerationRequest, Outcome, TokenBias
from tests.integration.parity_benches import SLOTS, Bench, name_of
from tests.models import EOS_ID
from tests.pair import Line, Outcomes, Reference, options, session, tasks_for
from tests.parity import Way, processed_requests, unprocessed_requests
from workers.head.engine import HeadEngine

pytest_plugins = ["tests.integration.parity_benches"]

#: on a tiny model, drafts of 4, the largest difference was 6.8e-5
LOGPROB_TOLERANCE = 1e-3

WAYS = [
    Way(drafter, length, 8 if (number + place) % 2 else 3)
    for number, drafter in enumerate(("none", "ngram", "model", "self"))
    for place, length in enumerate((0, 4, 8))
]


def assert_logprobs(requests: Sequence[GenerationRequest], outcomes: Sequence[Outcome], bench: Bench) -> float:
    """Those of the requests that ask for them are the uncut model's; returns the largest difference."""
    worst = 0.0
    for request, outcome, reference in zip(requests, outcomes, bench.references(requests), strict=True):
        if request.logprobs is None:
            assert outcome.logprobs == ()
            continue
        worst = max(worst, _difference(outcome, reference, request.logprobs))
    return worst


def _difference(outcome: Outcome, reference: Reference, num_top: int) -> float:
    assert [each.chosen.token for each in outcome.logprobs] == list(outcome.token_ids)
    own = torch.tensor([each.chosen.logprob for each in outcome.logprobs])
    expected = reference.logprobs.gather(1, torch.tensor([outcome.token_ids]).T)[:, 0]
    best = reference.logprobs.topk(num_top).values
    top = torch.tensor([[other.logprob for other in each.top] for each in outcome.logprobs])
    ids = torch.tensor([[other.token for other in each.top] for each in outcome.logprobs])
    assert top.shape == best.shape
    at_ids = reference.logprobs.gather(1, ids)
    return max(float((a - b).abs().max()) for a, b in ((own, expected), (top, best), (top, at_ids)))


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_a_tiny_models_processed_texts_are_the_uncut_models_whichever_way_they_are_made(tiny: Bench, way: Way) -> None:
    requests = processed_for(tiny, 24)
    outcomes = tiny.assert_parity(requests, way)
    assert assert_logprobs(requests, outcomes, tiny) < LOGPROB_TOLERANCE


def processed_for(bench: Bench, max_tokens: int) -> list[GenerationRequest]:
    """Requests whose processors concern the tokens that this model likes."""
    counts = Counter(token for outcome in plain_outcomes(bench) for token in outcome.token_ids)
    (eos,) = bench.halves.prompts.eos
    common = tuple(token for token, _ in counts.most_common(8) if token != eos)
    return processed_requests(max_tokens, eos=eos, common=common[:6])


@cache
def plain_outcomes(bench: Bench) -> list[Outcome]:
    return bench.run(unprocessed_requests(24), Way("none", 0, 8))


def test_every_processor_changes_a_text(tiny: Bench) -> None:
    """Else parity would prove nothing."""
    processed = tiny.run(processed_for(tiny, 24), Way("none", 0, 8))
    pairs = zip(processed, plain_outcomes(tiny), strict=True)
    changed = [mine.token_ids != plain.token_ids for mine, plain in pairs]
    assert all(any(changed[place::8]) for place in range(8)), changed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_processed_texts_of_smollm2_are_the_uncut_models_whichever_way_they_are_made(smollm2: Bench, way: Way) -> None:
    requests = processed_for(smollm2, 48)
    outcomes = smollm2.assert_parity(requests, way)
    assert assert_logprobs(requests, outcomes, smollm2) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_the_target_as_its_own_drafter_is_accepted_to_the_last_token_with_penalties_on(
    tiny: Bench, draft_length: int
) -> None:
    """What was drafted so far in the round counts in the drafter as it will at the tail."""
    rounds = 3
    requests = [
        replace(
            request,
            max_tokens=1 + rounds * (draft_length + 1),
            min_tokens=6,
            ignore_eos=False,
            stop_token_ids=(),
            logit_bias=(TokenBias(EOS_ID, -1e9), TokenBias(97, 3.0)),
        )
        for request in processed_for(tiny, 1)
    ]
    for outcome in tiny.run(requests, Way("self", draft_length, 8)):
        assert outcome.metrics is not None
        assert (outcome.metrics.rounds, outcome.metrics.tokens_per_round) == (rounds, draft_length + 1)
        assert outcome.metrics.accepted == outcome.metrics.drafted == rounds * draft_length


def test_a_lost_tail_changes_neither_a_processed_text_nor_its_log_probabilities(tiny: Bench) -> None:
    """Its jobs are prefilled again on another one, which counts what was committed before."""
    requests, outcomes = processed_for(tiny, 24), Outcomes()
    tasks = tasks_for(requests)
    engine = HeadEngine(
        tiny.halves.head,
        tiny.drafter("model"),
        Line(tiny.halves.prompts.read(task) for task in tasks),
        outcomes,
        options(slots=SLOTS, draft_length=4, lanes=1),
    )
    for turns in (20, 30, 40, 10_000):
        with session(tiny.halves, SLOTS, 1) as courier:
            engine.open(courier)
            for _ in range(turns):
                if len(outcomes.finished) < len(tasks):
                    engine.step()
        if turns < 10_000:
            assert any(0 < slot.job.completion.num_tokens < 24 for slot in engine._scheduler.live() if slot.job)
    ended = [outcomes.finished[task.task_id] for task in tasks]
    assert [outcome.token_ids for outcome in ended] == [r.tokens for r in tiny.references(requests)]
    assert assert_logprobs(requests, ended, tiny) < LOGPROB_TOLERANCE
