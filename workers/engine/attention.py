"""Attention masks for ragged rows over the slot cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def attention_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Which cache positions each query may see.

    `positions` [rows, query] are the queries' absolute positions. Returns bool [rows, 1, query, length]:
    True where the cache position is not after the query and fewer than `window` positions before it.
    """
    keys = torch.arange(length, device=positions.device)
    queries = positions[:, None, :, None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add to attention scores, which is what eager attention does with it."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def masks_by_layer_type(
    positions: Tensor, length: int, windows: Mapping[str, int | None], *, dtype: torch.dtype, eager: bool
) -> dict[str, Tensor]:
    """One mask [rows, 1, query, length] per layer type; boolean for sdpa, additive for eager attention."""
    by_window: dict[int | None, Tensor] = {}
    for window in windows.values():
        if window not in by_window:
            mask = attention_mask(positions, length, window)
            by_window[window] = additive(mask, dtype) if eager else mask
    return {kind: by_window[window] for kind, window in windows.items()}
