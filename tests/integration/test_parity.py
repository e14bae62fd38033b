"""P1: drafter, draft length and batch mates change only when a text arrives. Reference: the uncut model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from tests.integration.parity_benches import Bench, name_of
from tests.pair import generate, tasks_for
from tests.parity import EVERY_WAY, PAIRWISE_WAYS, Way, greedy_requests, sampled_requests

pytest_plugins = ["tests.integration.parity_benches"]


def _ways(ways: Sequence[Way], kept: Callable[[Way], bool]) -> list[ParameterSet]:
    """`ways` as parameters; those not kept are left to `make parity`."""
    return [pytest.param(way, marks=() if kept(way) else pytest.mark.slow, id=name_of(way)) for way in ways]


def _is_telling(way: Way) -> bool:
    """Every drafter with every draft length, eight jobs at a time; one at a time with two of them."""
    return way.concurrency == 8 or (way in PAIRWISE_WAYS and way.drafter in ("model", "hybrid"))


@pytest.mark.parametrize("way", _ways(EVERY_WAY, _is_telling))
def test_a_tiny_models_texts_are_the_uncut_models_whichever_way_they_are_made(tiny: Bench, way: Way) -> None:
    tiny.assert_parity(greedy_requests(24)[:8], way)
    tiny.assert_parity(sampled_requests(24)[8:16], way)


@pytest.mark.parametrize("way", _ways(PAIRWISE_WAYS, lambda way: way.draft_length == 4 and way.concurrency == 8))
def test_smollm2s_texts_are_the_uncut_models_whichever_way_they_are_made(smollm2: Bench, way: Way) -> None:
    smollm2.assert_parity([*greedy_requests(16)[:2], *sampled_requests(16)[3:5]], way)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", EVERY_WAY, ids=name_of)
def test_24_prompts_of_64_tokens_on_smollm2_are_the_uncut_models_whichever_way_they_are_made(
    smollm2: Bench, way: Way
) -> None:
    smollm2.assert_parity(greedy_requests(64), way)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", EVERY_WAY, ids=name_of)
def test_24_sampled_texts_of_64_tokens_on_smollm2_are_the_uncut_models_whichever_way_they_are_made(
    smollm2: Bench, way: Way
) -> None:
    smollm2.assert_parity(sampled_requests(64), way)


def test_other_seeds_give_other_texts(tiny: Bench) -> None:
    way = Way("ngram", 4, 8)
    first, second = (tiny.run(sampled_requests(32, first_seed=seed), way) for seed in (100, 500))
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_the_target_as_its_own_drafter_is_accepted_to_the_last_token_of_every_round(
    tiny: Bench, draft_length: int
) -> None:
    """A hole in the drafter's cache after a fully accepted round would show here first."""
    rounds = 3
    requests = [
        replace(request, max_tokens=1 + rounds * (draft_length + 1), ignore_eos=True)
        for request in (greedy_requests(1) + sampled_requests(1))
    ]
    for outcome in tiny.run(requests, Way("self", draft_length, 8)):
        assert outcome.metrics is not None
        assert (outcome.metrics.rounds, outcome.metrics.tokens_per_round) == (rounds, draft_length + 1)
        assert outcome.metrics.accepted == outcome.metrics.drafted == rounds * draft_length


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_size_of_prefill_chunks_does_not_change_a_text(tiny: Bench, chunk: int) -> None:
    requests = greedy_requests(16)[:6]
    outcomes = generate(
        tiny.halves, tasks_for(requests), tiny.drafter("ngram"), draft_length=4, concurrency=3, prefill_chunk=chunk
    )
    assert [outcome.token_ids for outcome in outcomes] == [r.tokens for r in tiny.references(requests)]


def test_rows_on_two_lanes_do_not_mix(tiny: Bench) -> None:
    requests = [*greedy_requests(24), *sampled_requests(24)]
    outcomes = generate(tiny.halves, tasks_for(requests), tiny.drafter("model"), draft_length=4, concurrency=7, lanes=2)
    assert [outcome.token_ids for outcome in outcomes] == [r.tokens for r in tiny.references(requests)]
