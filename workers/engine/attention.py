"""Attention of ragged rows over the slot cache: the masks, and grouped queries without repeated keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

#: the name under which `grouped_attention` is known to the library's models
GROUPED = "shardq_grouped"


def register_grouped_attention() -> None:
    """Make `attn_implementation=GROUPED` available; may be called again."""
    AttentionInterface.register(GROUPED, grouped_attention)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's sdpa attention, but reading every key and value once.

    With masks it would repeat keys and values for every query head of a group, at 8 rows ten times the cost of
    the attention itself. Here the group's queries stand behind each other as one longer query instead.

    `query` [rows, kv_heads * group, query, dim]; `key`, `value` [rows, kv_heads, length, dim]; `attention_mask`
    bool [rows, 1, group * query, length], the same for each query of a group. Returns [rows, query, heads, dim].
    """
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads * length, dim)
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, heads, length, dim).transpose(1, 2).contiguous(), None


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
