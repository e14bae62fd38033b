from __future__ import annotations

import pytest
import torch

from workers.engine.nucleus import SELECTED, by_selection, by_sorting, top_p

VOCABULARY = 3 * SELECTED


def limits(value: float, rows: int) -> torch.Tensor:
    return torch.full((rows, 1), value, dtype=torch.float64)


@pytest.mark.parametrize("limit", [0.0, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_a_nucleus_is_the_same_whether_selected_or_sorted_out(limit: float) -> None:
    scales = torch.tensor([[0.01], [1.0], [3.0], [10.0], [3.0]])
    scores = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3)) * scales
    scores[2] = scores[2].round()  # many ties
    scores[4, 100:] = float("-inf")  # what a filter before this one left
    expected = by_sorting(scores, limits(limit, 5))
    assert torch.equal(top_p(scores, limits(limit, 5)), expected)
    kept, found = by_selection(scores, limits(limit, 5))
    assert bool(found[3])
    assert torch.equal(kept[found], expected[found].isfinite())


def test_a_nucleus_larger_than_the_selection_is_sorted_out() -> None:
    scores = torch.zeros(2, VOCABULARY)
    scores[0, 7] = 20.0
    kept, found = by_selection(scores, limits(0.9, 2))
    assert found.tolist() == [True, False]
    assert kept[0].nonzero().flatten().tolist() == [7]
    assert int(top_p(scores, limits(0.9, 2))[1].isfinite().sum()) == pytest.approx(0.9 * VOCABULARY, abs=2)


def test_of_equally_likely_tokens_on_the_limit_those_with_the_highest_ids_stay() -> None:
    scores = torch.full((1, VOCABULARY), -50.0)
    scores[0, [3, 30, 300, 2000]] = 1.0
    assert by_selection(scores, limits(0.5, 1))[0].nonzero()[:, 1].tolist() == [300, 2000]
    assert top_p(scores, limits(0.5, 1)).isfinite().nonzero()[:, 1].tolist() == [300, 2000]
