"""The model families that may be cut, and what cutting has to know about each.

A family enters `FAMILIES` only with its own cut-versus-uncut test (tests/unit/test_engine_parity.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from workers.errors import ModelUnsupported


class MaskStyle(Enum):
    """What the family's base model takes as `attention_mask`."""

    #: one causal mask for all layers
    FULL = "full"
    #: one mask for all layers, windowed if the config has a `sliding_window`
    WINDOW = "window"
    #: a dict of masks by layer type
    BY_LAYER_TYPE = "by layer type"


class LogitTransform(Enum):
    """What the family's causal model does to the LM head's output, outside of its base model."""

    NONE = "none"
    #: cap * tanh(logits / cap)
    SOFTCAP = "softcap"
    #: logits * logit_scale
    MULTIPLY = "multiply"
    #: logits / logits_scaling
    DIVIDE = "divide"


@dataclass(frozen=True)
class Family:
    """Facts about one model type."""

    masks: MaskStyle = MaskStyle.FULL
    transform: LogitTransform = LogitTransform.NONE
    #: attention scores are capped, which only the eager implementation does
    softcaps_scores: bool = False
    #: attribute of the base model that scales its inputs in forward, so would scale the tail's input again
    embedding_scale: str | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(masks=MaskStyle.BY_LAYER_TYPE),
    "qwen3": Family(masks=MaskStyle.BY_LAYER_TYPE),
    "mistral": Family(masks=MaskStyle.WINDOW),
    "gemma2": Family(masks=MaskStyle.BY_LAYER_TYPE, transform=LogitTransform.SOFTCAP, softcaps_scores=True),
    "gemma3_text": Family(masks=MaskStyle.BY_LAYER_TYPE, transform=LogitTransform.SOFTCAP),
    "phi3": Family(masks=MaskStyle.WINDOW),
    "granite": Family(transform=LogitTransform.DIVIDE, embedding_scale="embedding_multiplier"),
    "cohere": Family(transform=LogitTransform.MULTIPLY),
    "cohere2": Family(masks=MaskStyle.BY_LAYER_TYPE, transform=LogitTransform.MULTIPLY),
}


def family_of(model_type: str | None) -> Family:
    """The facts about a text model's type; ModelUnsupported if it is not on the list."""
    family = None if model_type is None else FAMILIES.get(model_type)
    if family is None:
        allowed = ", ".join(sorted(FAMILIES))
        raise ModelUnsupported(f"model type {model_type!r} is not supported; supported: {allowed}")
    return family


def transform_logits(logits: Tensor, family: Family, config: PreTrainedConfig) -> Tensor:
    """What the family's causal model would make of its LM head's output, in the same dtype."""
    if family.transform is LogitTransform.SOFTCAP:
        cap = config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
    if family.transform is LogitTransform.MULTIPLY:
        return logits.mul(config.logit_scale)
    if family.transform is LogitTransform.DIVIDE:
        return logits.div(config.logits_scaling)
    return logits


def mask_windows(family: Family, config: PreTrainedConfig) -> dict[str, int | None]:
    """The attention window in tokens (None: no window) of every layer type in the config.

    A family with one mask for all layers has the single layer type "all".
    """
    if family.masks is MaskStyle.FULL:
        return {"all": None}
    if family.masks is MaskStyle.WINDOW:
        return {"all": config.sliding_window}
    return {
        kind: config.sliding_window if kind == "sliding_attention" else None for kind in sorted(set(config.layer_types))
    }


#: lists in a config that may have as many entries as the model has layers without being one entry per layer
NOT_PER_LAYER = frozenset({"architectures", "eos_token_id", "bos_token_id", "pad_token_id"})


def shorten(config: PreTrainedConfig, first: int, last: int) -> PreTrainedConfig:
    """A copy of a text config that describes layers [first, last) alone.

    Every list with one entry per layer (`layer_types`, `no_rope_layers`, ...) is sliced with them.
    """
    values: dict[str, Any] = config.to_dict()
    num_layers = config.num_hidden_layers
    short: PreTrainedConfig = type(config).from_dict(values)
    for name in values:
        value = vars(config).get(name)
        if isinstance(value, list) and len(value) == num_layers and name not in NOT_PER_LAYER:
            setattr(short, name, value[first:last])
    short.num_hidden_layers = last - first
    return short
