"""Rows of different lengths, packed and padded."""

from __future__ import annotations

import torch

from workers.engine.tensors import pack_rows, pad_rows, padded_places

COUNTS = [2, 5, 1, 3]


def test_packing_undoes_padding() -> None:
    packed = torch.arange(11.0)[:, None]

    assert torch.equal(pack_rows(pad_rows(packed, COUNTS), COUNTS), packed)


def test_a_row_is_padded_with_nothing_of_another_one() -> None:
    """A row of no numbers must not get into the caches of the others."""
    packed = torch.arange(11.0)
    packed[:2] = float("nan")

    padded = packed[padded_places(COUNTS, 6)].reshape(4, 6)

    assert padded[0].isnan().all()
    assert padded[1:].isfinite().all()
    for row, own in enumerate(torch.split(packed, COUNTS)):
        assert torch.equal(padded[row, : len(own)].nan_to_num(-1), own.nan_to_num(-1))
