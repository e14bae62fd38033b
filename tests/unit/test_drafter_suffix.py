"""Suffix drafting: what followed the row's end in its own text and in the batch's other outputs."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.messages import Sampling
from workers.head.drafters.drafter import NOTHING, DraftRow, Proposal
from workers.head.drafters.suffix import SuffixDrafter

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def row(tokens: list[int], limit: int = 4, slot: int = 0) -> DraftRow:
    return DraftRow(slot=slot, tokens=tokens, sampling=GREEDY, limit=limit)


def propose(drafter: SuffixDrafter, tokens: list[int], limit: int = 4, slot: int = 0) -> Proposal:
    (proposal,) = drafter.propose([row(tokens, limit, slot)])
    assert len(proposal.tokens) == len(proposal.confidence) <= limit
    assert all(0 < sure < 1 for sure in proposal.confidence)
    return proposal


def finish(drafter: SuffixDrafter, prompt: list[int], output: list[int], slot: int = 0) -> None:
    """A job from its first token to its last: its end is committed after its last draft."""
    tokens = [*prompt, output[0]]
    drafter.begin(slot)
    propose(drafter, tokens, slot=slot)
    tokens.extend(output[1:])
    drafter.end(slot)


@pytest.fixture
def drafter() -> SuffixDrafter:
    drafter = SuffixDrafter()
    drafter.begin(0)
    return drafter


def test_what_followed_in_the_own_prompt_is_drafted(drafter: SuffixDrafter) -> None:
    assert propose(drafter, [1, 2, 3, 4, 5, 9, 1, 2], limit=3).tokens == (3, 4, 5)


def test_what_followed_in_the_own_output_is_drafted(drafter: SuffixDrafter) -> None:
    propose(drafter, [50, 51])
    assert propose(drafter, [50, 51, 1, 2, 3, 4, 1, 2], limit=2).tokens == (3, 4)


def test_a_loop_is_drafted_round_and_round(drafter: SuffixDrafter) -> None:
    propose(drafter, [9, 5])
    assert propose(drafter, [9, 5, 1, 2, 1, 2], limit=5).tokens == (1, 2, 1, 2, 1)


def test_what_a_finished_job_said_is_drafted_to_its_last_token_and_no_further(drafter: SuffixDrafter) -> None:
    finish(drafter, [1, 2], [10, 11, 12, 13, 14], slot=1)
    assert propose(drafter, [7, 8, 10, 11], limit=9).tokens == (12, 13, 14)


def test_what_a_running_job_said_is_drafted(drafter: SuffixDrafter) -> None:
    drafter.begin(1)
    propose(drafter, [1, 2, 10, 11, 12, 13], slot=1)
    propose(drafter, [1, 2, 10, 11, 12, 13, 20, 21, 22, 23], slot=1)
    assert propose(drafter, [7, 8, 20, 21], limit=2).tokens == (22, 23)


def test_a_first_token_is_drafted_from_how_other_outputs_began_behind_the_same_end_of_a_prompt(
    drafter: SuffixDrafter,
) -> None:
    template = [90, 91, 92]
    finish(drafter, [1, 2, *template], [10, 11, 12], slot=1)
    assert propose(drafter, [5, 6, *template, 10]).tokens == (11, 12)


def test_the_prompts_of_other_jobs_are_not_drafted(drafter: SuffixDrafter) -> None:
    finish(drafter, [1, 2, 3, 4, 5, 6], [10, 11], slot=1)
    assert propose(drafter, [7, 8, 2, 3]) == NOTHING


def test_the_continuation_that_was_seen_most_often_wins_and_is_the_surer_the_more_agree() -> None:
    split, agreed = SuffixDrafter(), SuffixDrafter()
    for output in ([10, 11, 30], [10, 11, 30], [10, 11, 40]):
        finish(split, [1, 2], output, slot=1)
    for output in ([10, 11, 30], [10, 11, 30], [10, 11, 30]):
        finish(agreed, [1, 2], output, slot=1)
    split.begin(0)
    agreed.begin(0)
    first, second = propose(split, [7, 8, 10, 11]), propose(agreed, [7, 8, 10, 11])
    assert first.tokens == second.tokens == (30,)
    assert first.confidence[0] < second.confidence[0]


def test_a_longer_match_is_surer_and_beats_a_more_recent_shorter_one(drafter: SuffixDrafter) -> None:
    finish(drafter, [1, 2], [20, 21, 22, 23, 30], slot=1)
    finish(drafter, [1, 2], [10, 22, 23, 40], slot=1)
    longer = propose(drafter, [7, 8, 20, 21, 22, 23])
    assert longer.tokens == (30,)
    drafter.begin(2)
    shorter = propose(drafter, [7, 8, 22, 23], slot=2)
    assert shorter.confidence[0] < longer.confidence[0]


def test_a_single_token_is_no_match(drafter: SuffixDrafter) -> None:
    assert propose(drafter, [1, 2, 3, 9, 2]) == NOTHING


def test_a_limit_of_none_drafts_nothing_but_learns(drafter: SuffixDrafter) -> None:
    assert propose(drafter, [1, 2, 3, 1, 2], limit=0) == NOTHING
    assert propose(drafter, [1, 2, 3, 1, 2], limit=1).tokens == (3,)


def test_the_oldest_finished_output_is_forgotten_first_and_leaves_nothing_behind() -> None:
    drafter = SuffixDrafter(most_tokens=40)
    finish(drafter, [1, 2], list(range(100, 115)))
    finish(drafter, [1, 2], list(range(200, 215)))
    assert drafter.outputs.num_tokens == 34
    finish(drafter, [1, 2], list(range(300, 315)))
    assert drafter.outputs.num_tokens == 34
    drafter.begin(0)
    assert propose(drafter, [7, 8, 100, 101]) == NOTHING
    drafter.begin(0)
    assert propose(drafter, [7, 8, 200, 201]).tokens == (202, 203, 204, 205)
    drafter.end(0)
    finish(drafter, [1, 2], list(range(400, 500)))
    assert (drafter.outputs.num_tokens, drafter.outputs.num_ngrams) == (0, 0)


def test_an_output_of_the_running_job_is_not_forgotten_under_it() -> None:
    drafter = SuffixDrafter(most_tokens=10)
    drafter.begin(0)
    tokens = [1, *range(50)]
    propose(drafter, tokens[:2])
    propose(drafter, tokens)
    finish(drafter, [1, 2], [60, 61, 62], slot=1)
    assert propose(drafter, [*tokens, 3, 4]).tokens == (5, 6, 7, 8)


def test_memory_stays_flat_over_many_jobs() -> None:
    drafter, rng, sizes = SuffixDrafter(most_tokens=500), random.Random(0), []
    for _ in range(60):
        finish(drafter, [rng.randrange(9) for _ in range(50)], [rng.randrange(1000) for _ in range(40)])
        sizes.append((drafter.outputs.num_tokens, drafter.outputs.num_ngrams))
    assert max(tokens for tokens, _ in sizes) <= 500
    assert max(ngrams for _, ngrams in sizes) <= 3 * 500


def test_ending_a_slot_that_never_drafted_is_fine() -> None:
    drafter = SuffixDrafter()
    drafter.end(5)
    drafter.begin(5)
    drafter.end(5)
    assert drafter.outputs.num_tokens == 0


def test_a_restart_of_the_slot_keeps_what_was_said() -> None:
    drafter = SuffixDrafter()
    drafter.begin(0)
    propose(drafter, [1, 2, 10, 11, 12])
    propose(drafter, [1, 2, 10, 11, 12, 20, 21, 22])
    drafter.begin(0)
    assert propose(drafter, [7, 8, 20, 21]).tokens == (22,)


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), min_size=1, max_size=6), st.integers(0, 12))
def test_a_draft_always_occurred_behind_the_same_two_tokens(texts: list[list[int]], limit: int) -> None:
    drafter = SuffixDrafter()
    for text in texts[:-1]:
        finish(drafter, text[:1], text[1:])
    drafter.begin(0)
    proposal = propose(drafter, texts[-1], limit)
    if proposal.tokens:
        wanted = (*texts[-1][-2:], proposal.tokens[0])
        assert any(tuple(text[at : at + 3]) == wanted for text in texts for at in range(len(text)))


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=20), min_size=1, max_size=8))
def test_the_same_history_gives_the_same_drafts(texts: list[list[int]]) -> None:
    def run() -> list[Proposal]:
        drafter, proposals = SuffixDrafter(most_tokens=50), []
        for text in texts:
            drafter.begin(0)
            proposals += [propose(drafter, text[:end]) for end in range(2, len(text) + 1)]
            drafter.end(0)
        return proposals

    assert run() == run()


def test_a_proposal_takes_microseconds_however_much_is_remembered() -> None:
    drafter, rng = SuffixDrafter(), random.Random(0)
    for _ in range(100):
        finish(drafter, [1, 2], [rng.randrange(20) for _ in range(200)])
    drafter.begin(0)
    tokens = [rng.randrange(20) for _ in range(500)]
    propose(drafter, tokens)
    best = float("inf")
    for _ in range(50):
        tokens.append(rng.randrange(20))
        begin = time.perf_counter()
        drafter.propose([row(tokens, limit=16)])
        best = min(best, time.perf_counter() - begin)
    assert best < 200e-6
