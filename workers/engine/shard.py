"""Running a half of a model, or a whole one, over the slots of its own cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.engine.attention import masks_by_layer_type
from workers.engine.families import Family, MaskStyle, mask_windows, transform_logits
from workers.engine.kvcache import RowsOfCache, SlotCache
from workers.engine.quantization import stored_bytes


@dataclass(frozen=True)
class Capacity:
    """How much a half holds: its caches are allocated once for this."""

    slots: int
    #: positions a slot can hold, in tokens
    max_length: int
    #: most tokens per row in one forward; also the positions kept free behind `max_length` for padding
    max_query: int


class Half:
    """Layers of one model and their cache: the part that head, tail and drafter have in common.

    All forwards take rows of the same number of query tokens. Row r's token i stands at the absolute position
    `starts[r] + i` of slot `slots[r]` and sees the positions up to its own. A row with fewer tokens is padded
    at its end; what padding writes lies behind the row and is overwritten later. A row that only fills up the
    forward uses the scratch slot, whose number is `slots`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        config: PreTrainedConfig,
        family: Family,
        capacity: Capacity,
        *,
        eager: bool,
    ) -> None:
        """`base` is a base model of the shortened `config`, with its weights."""
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.slots = capacity.slots
        self.max_length = capacity.max_length
        self.max_query = capacity.max_query
        self.scratch_slot = capacity.slots
        parameter = next(each for each in base.parameters() if each.is_floating_point())  # not a quantised one
        self.dtype: torch.dtype = parameter.dtype
        self.device: torch.device = parameter.device
        self._base = base
        self._family = family
        self._eager = eager
        self._group: int = config.num_attention_heads // config.num_key_value_heads
        self._windows = mask_windows(family, config)
        self._cache_argument = _cache_argument(base)
        self._cache = SlotCache(
            num_layers=self.num_layers,
            slots=self.slots,
            num_kv_heads=config.num_key_value_heads,
            capacity=self.max_length + self.max_query,
            head_dim=head_dim(config),
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the weights, with the scales of quantised ones, without the cache."""
        return stored_bytes(self._base)

    @torch.inference_mode()
    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Make the first `length` positions of `destination` those of `source`."""
        self._cache.copy_slot(source, destination, length)

    @torch.inference_mode()
    def zero_slot(self, slot: int) -> None:
        """Clear a slot that saw non-finite values before it is used again."""
        self._cache.zero_slot(slot)

    def _run(self, inputs: dict[str, Tensor], slots: Tensor, starts: Tensor) -> Tensor:
        """Feed tokens or hidden states [rows, query, ...] through the layers: [rows, query, hidden]."""
        (tensor,) = inputs.values()
        query = tensor.shape[1]
        length = int(starts.max()) + query
        if length > self._cache.capacity:
            raise ValueError(f"position {length} is beyond the cache's {self._cache.capacity}")
        positions = starts[:, None] + torch.arange(query, device=self.device)
        # grouped attention stands the queries of a group behind each other
        seen_from = positions if self._eager else positions.repeat(1, self._group)
        masks = masks_by_layer_type(seen_from, length, self._windows, dtype=self.dtype, eager=self._eager)
        arguments: dict[str, Any] = {
            **inputs,
            "position_ids": positions,
            "attention_mask": masks if self._family.masks is MaskStyle.BY_LAYER_TYPE else masks["all"],
            self._cache_argument: RowsOfCache(self._cache, slots, positions, length),
            "use_cache": True,
        }
        hidden: Tensor = self._base(**arguments).last_hidden_state
        return hidden


class HeadShard(Half):
    """Embeddings and layers [0, split)."""

    @torch.inference_mode()
    def forward(self, tokens: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """Token ids [rows, query] to hidden states [rows, query, hidden] at the cut."""
        return self._run({"input_ids": tokens}, slots, starts)


class _WithLMHead(Half):
    """A half that ends in final norm and LM head."""

    def __init__(
        self,
        base: PreTrainedModel,
        lm_head: nn.Linear,
        config: PreTrainedConfig,
        family: Family,
        capacity: Capacity,
        *,
        eager: bool,
    ) -> None:
        super().__init__(base, config, family, capacity, eager=eager)
        self._lm_head = lm_head

    @property
    def num_weight_bytes(self) -> int:
        """As every half's, and the LM head's, unless it shares the embeddings."""
        shared = any(weight.data_ptr() == self._lm_head.weight.data_ptr() for weight in self._base.parameters())
        return super().num_weight_bytes + (0 if shared else self._lm_head.weight.nbytes)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] to float32 logits [n, vocab], with the model's own transform."""
        return transform_logits(self._lm_head(hidden), self._family, self.config).float()


class TailShard(_WithLMHead):
    """Layers [split, L), final norm and LM head."""

    @torch.inference_mode()
    def forward(self, hidden: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """Hidden states [rows, query, hidden] at the cut to hidden states after the final norm."""
        return self._run({"inputs_embeds": hidden}, slots, starts)


class WholeModel(_WithLMHead):
    """All layers in one piece: a drafter, or a model that fits one machine."""

    @torch.inference_mode()
    def forward(self, tokens: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """Token ids [rows, query] to hidden states [rows, query, hidden] after the final norm."""
        return self._run({"input_ids": tokens}, slots, starts)


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one attention head's keys and values."""
    declared: int | None = config.to_dict().get("head_dim")
    return declared or config.hidden_size // config.num_attention_heads


def _cache_argument(base: PreTrainedModel) -> str:
    """The cache's name in the model's forward: `past_key_values` before transformers 5.24, then `cache`."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
