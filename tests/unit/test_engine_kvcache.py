"""Slots: rewinds, copies, scratch rows and forgetting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models import tiny_model
from workers.engine.attention import additive, attention_mask
from workers.engine.loader import load_whole
from workers.engine.shard import WholeModel

TEXT = list(b"the quick brown fox")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(directory: Path) -> WholeModel:
    return load_whole(directory, slots=4, max_length=32, max_query=20)


def feed(model: WholeModel, tokens: list[int], slot: int, start: int = 0) -> Tensor:
    """Hidden states [tokens, hidden] of one row."""
    return model.forward(torch.tensor([tokens]), torch.tensor([slot]), torch.tensor([start]))[0]


def test_a_rewind_leaves_no_trace(model: WholeModel) -> None:
    expected = feed(model, TEXT, slot=0)
    feed(model, [*TEXT[:8], 1, 2, 3, 4, 5, 6], slot=2)
    after = feed(model, TEXT[8:], slot=2, start=8)
    torch.testing.assert_close(after, expected[8:], atol=1e-5, rtol=0)


def test_a_copied_prefix_continues_as_if_fed(model: WholeModel) -> None:
    expected = feed(model, TEXT, slot=0)
    feed(model, [7] * 20, slot=3)
    model.copy_slot(0, 3, 10)
    torch.testing.assert_close(feed(model, TEXT[10:], slot=3, start=10), expected[10:], atol=1e-5, rtol=0)


def test_rows_do_not_see_each_other(model: WholeModel) -> None:
    alone = feed(model, TEXT[:5], slot=1)
    tokens = torch.tensor([TEXT[:5], [9] * 5, [8] * 5])
    together = model.forward(tokens, torch.tensor([3, 0, 4]), torch.tensor([0, 0, 0]))
    torch.testing.assert_close(together[0], alone, atol=1e-5, rtol=0)


def test_rows_may_share_the_scratch_slot(model: WholeModel) -> None:
    assert model.scratch_slot == 4
    expected = feed(model, TEXT[:3], slot=0)
    tokens = torch.tensor([TEXT[:3], [1, 2, 3], [4, 5, 6]])
    scratch = torch.tensor([2, model.scratch_slot, model.scratch_slot])
    together = model.forward(tokens, scratch, torch.tensor([0, 0, 0]))
    torch.testing.assert_close(together[0], expected, atol=1e-5, rtol=0)


def test_a_zeroed_slot_forgets_values_that_poison_attention(model: WholeModel) -> None:
    expected = feed(model, TEXT[:4], slot=0)
    model._cache.keys[:, 1, :, 6:9] = torch.nan
    model._cache.values[:, 1, :, 6:9] = torch.inf
    tokens = torch.tensor([TEXT[:4], TEXT[:4]])
    ragged = (torch.tensor([1, 2]), torch.tensor([0, 12]))  # the longer row makes both read 16 positions
    assert not model.forward(tokens, *ragged)[0].isfinite().all()
    model.zero_slot(1)
    torch.testing.assert_close(model.forward(tokens, *ragged)[0], expected, atol=1e-5, rtol=0)


def test_padding_may_reach_behind_the_longest_row_and_no_further(model: WholeModel) -> None:
    feed(model, [1] * 20, slot=0, start=32)
    with pytest.raises(ValueError, match="beyond the cache"):
        feed(model, [1] * 20, slot=0, start=33)


def test_a_half_tells_its_sizes(model: WholeModel) -> None:
    sizes = (model.hidden_size, model.vocab_size, model.num_layers, model.slots, model.max_length, model.max_query)
    assert sizes == (48, 264, 4, 4, 32, 20)
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")


def test_a_query_sees_itself_and_what_its_window_reaches() -> None:
    positions = torch.tensor([[0, 1], [3, 4]])
    assert attention_mask(positions, 5, None)[:, 0].int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]
    assert attention_mask(positions, 5, 2)[:, 0].int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
        [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]],
    ]


def test_an_additive_mask_is_zero_where_the_boolean_one_is_true() -> None:
    mask = additive(torch.tensor([True, False]), torch.float16)
    assert mask.dtype == torch.float16
    assert mask.tolist() == [0.0, torch.finfo(torch.float16).min]
