"""Prompt lookup drafts what followed the most recent occurrence of the longest match."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from relay.messages import Sampling
from workers.head.drafters.drafter import NOTHING, DraftRow
from workers.head.drafters.ngram import NgramDrafter
from workers.head.drafters.none import NoDrafter

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def row(tokens: list[int], limit: int = 4, slot: int = 0) -> DraftRow:
    return DraftRow(slot=slot, tokens=tokens, sampling=GREEDY, limit=limit)


def draft(tokens: list[int], limit: int = 4, longest: int = 3, shortest: int = 1) -> list[int]:
    drafter = NgramDrafter(longest, shortest)
    drafter.begin(0)
    (proposal,) = drafter.propose([row(tokens, limit)])
    assert len(proposal.tokens) == len(proposal.confidence)
    assert all(0 < sure <= 1 for sure in proposal.confidence)
    return list(proposal.tokens)


def rescan(tokens: list[int], limit: int, longest: int, shortest: int) -> list[int]:
    """The same rule by searching from the end."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                out = list(tokens)
                for place in range(start + length, start + length + limit):
                    out.append(out[place])
                return out[len(tokens) :]
    return []


def test_what_followed_the_same_tokens_before_is_drafted() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2], limit=3) == [3, 4, 5]


def test_a_longer_match_beats_a_more_recent_one() -> None:
    assert draft([7, 1, 2, 30, 5, 2, 40, 7, 1, 2], limit=1) == [30]


def test_of_matches_of_one_length_the_most_recent_counts() -> None:
    assert draft([1, 2, 30, 1, 2, 40, 1, 2], limit=1) == [40]


def test_without_a_match_nothing_is_drafted() -> None:
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []


def test_a_match_shorter_than_the_shortest_is_ignored() -> None:
    assert draft([1, 2, 3, 9, 2], shortest=2) == []


def test_a_loop_is_drafted_round_and_round() -> None:
    assert draft([5, 1, 2, 1, 2], limit=5) == [1, 2, 1, 2, 1]


def test_a_limit_of_none_drafts_nothing() -> None:
    assert draft([1, 2, 1, 2], limit=0) == []


def test_slots_do_not_see_each_other_and_a_new_generation_forgets() -> None:
    drafter = NgramDrafter(3, 1)
    for slot in (0, 1):
        drafter.begin(slot)
    first, second = drafter.propose([row([1, 2, 3, 1, 2], slot=0), row([9, 8, 1, 2], slot=1)])
    assert first.tokens[:1] == (3,)
    assert second == NOTHING
    drafter.end(0)
    drafter.begin(0)
    assert drafter.propose([row([1, 2])]) == [NOTHING]


def test_ending_a_slot_that_never_drafted_is_fine() -> None:
    for drafter in (NgramDrafter(), NoDrafter()):
        drafter.end(5)
        drafter.begin(5)
        assert drafter.propose([row([1, 2], slot=5)]) == [NOTHING]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_the_growing_index_finds_what_a_rescan_finds(tokens: list[int], data: st.DataObject) -> None:
    shortest = data.draw(st.integers(1, 3))
    longest = data.draw(st.integers(shortest, 4))
    drafter = NgramDrafter(longest, shortest)
    drafter.begin(0)
    end = 1
    while end <= len(tokens):
        limit = data.draw(st.integers(0, 6))
        (proposal,) = drafter.propose([row(tokens[:end], limit)])
        assert list(proposal.tokens) == rescan(tokens[:end], limit, longest, shortest)
        end += data.draw(st.integers(1, 5))


def test_a_proposal_does_not_cost_a_rescan_of_the_row() -> None:
    drafter = NgramDrafter()
    drafter.begin(0)
    tokens = [i % 9973 for i in range(100_000)]
    drafter.propose([row(tokens)])
    begin = time.perf_counter()
    for _ in range(100):
        tokens.append(1)
        drafter.propose([row(tokens)])
    assert time.perf_counter() - begin < 0.1


def test_no_drafter_proposes_nothing() -> None:
    drafter = NoDrafter()
    drafter.begin(0)
    assert drafter.propose([row([1, 1, 1, 1])] * 2) == [NOTHING, NOTHING]
