"""Running a half of a model, or a whole one, over the slots of its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.engine.attention import masks_by_layer_type
from workers.engine.checkpoint import EMBEDDING
from workers.engine.drafting import draft_recorded
from workers.engine.families import Family, MaskStyle, mask_windows, transform_logits
from workers.engine.graphs import Bucket, Graphs, Key, bucket_of, current, recorder_for
from workers.engine.kvcache import RowsOfCache, SlotCache
from workers.engine.processors import LogitRow
from workers.engine.quantization import stored_bytes
from workers.engine.slottables import SlotTables

if TYPE_CHECKING:
    from workers.engine.decoder import Decoder

#: compute capability from which Triton's products use tensor cores
FUSED_FROM = (8, 0)


@dataclass(frozen=True)
class Capacity:
    """How much a half holds: its caches are allocated once for this."""

    slots: int
    #: positions a slot can hold, in tokens
    max_length: int
    #: most tokens per row in one forward; also the positions kept free behind `max_length` for padding
    max_query: int


@dataclass(frozen=True)
class Mode:
    """How a half computes; its results are the same but for rounding."""

    #: record computations once per shape and replay them
    graphs: bool = False
    #: a token's bits depend on nothing but the tokens before it
    exact: bool = False


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
        mode: Mode,
    ) -> None:
        """`base` is a base model of the shortened `config`, with its weights; `eager` its attention."""
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
        self._decoder = make_decoder(base, config, self._cache, mode)
        #: no fused layers that keep tokens apart: then they are fed one by one
        self._singly = mode.exact and self._decoder is None
        self._graphs = Graphs(recorder_for(self.device), self.device) if mode.graphs and not self._singly else None

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

    @property
    def graphs(self) -> Graphs | None:
        """The half's recorded computations; None where forwards run as they come."""
        return self._graphs

    def bucket(self, rows: int, query: int, longest: int) -> Bucket:
        """The shape in which a forward of so many rows runs; `longest` is the end of the longest one."""
        return bucket_of(rows, query, longest, max_query=self.max_query, capacity=self._cache.capacity)

    def run(self, inputs: Tensor, slots: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Feed tokens [rows, query] or hidden states [rows, query, hidden] through the layers: [rows, query, hidden].

        Everything on the half's device, nothing read back. `starts[r]` + query is `longest` at most.
        """
        if longest > self._cache.capacity:
            raise ValueError(f"position {longest} is beyond the cache's {self._cache.capacity}")
        if self._decoder is not None:
            with current(self.device):
                return self._decoder.forward(inputs, slots, starts, longest)
        if self._singly:
            return self._run_singly(inputs, slots, starts)
        return self._run_library(inputs, slots, starts, longest)

    def _run_singly(self, inputs: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """Token by token: the shapes of all that is computed for one depend on its position only."""
        rows = []
        for number, start in enumerate(starts.tolist()):
            row, slot = inputs[number, None], slots[number, None]
            tokens = [
                self._run_library(row[:, i, None], slot, starts[number, None] + i, start + i + 1)
                for i in range(inputs.shape[1])
            ]
            rows.append(torch.cat(tokens, dim=1))
        return torch.cat(rows)

    def _run_library(self, inputs: Tensor, slots: Tensor, starts: Tensor, longest: int) -> Tensor:
        """All rows at once through the library's own layers."""
        query = inputs.shape[1]
        positions = starts[:, None] + torch.arange(query, device=self.device)
        # grouped attention stands the queries of a group behind each other
        seen_from = positions if self._eager else positions.repeat(1, self._group)
        masks = masks_by_layer_type(seen_from, longest, self._windows, dtype=self.dtype, eager=self._eager)
        arguments: dict[str, Any] = {
            "input_ids" if inputs.dim() == 2 else "inputs_embeds": inputs,
            "position_ids": positions,
            "attention_mask": masks if self._family.masks is MaskStyle.BY_LAYER_TYPE else masks["all"],
            self._cache_argument: RowsOfCache(self._cache, slots, positions, longest),
            "use_cache": True,
        }
        hidden: Tensor = self._base(**arguments).last_hidden_state
        return hidden

    @torch.inference_mode()
    def forward(self, inputs: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """What a half makes of rows of inputs: token ids [rows, query], or hidden states [rows, query, hidden] of the
        cut, to hidden states [rows, query, hidden] of the cut, or after the final norm.

        `inputs`, `slots` and `starts` may lie on any device; best on the CPU, where reading them waits for nothing.
        Where computations are recorded the result is good until the next forward.
        """
        longest = int(starts.max()) + inputs.shape[1]
        if self._graphs is None:
            return self.run(inputs.to(self.device), slots.to(self.device), starts.to(self.device), longest)
        rows, query = inputs.shape[:2]
        bucket = self.bucket(rows, query, longest)
        graph = self._graphs.get(
            Key("forward", bucket),
            lambda: self.padding(bucket, inputs),
            lambda inputs, slots, starts: {"hidden": self.run(inputs, slots, starts, bucket.longest)},
        )
        outputs = graph.run(inputs=_wider(inputs, bucket.query), slots=self.with_scratch(slots, bucket), starts=starts)
        return outputs["hidden"][:rows, :query]

    def with_scratch(self, slots: Tensor, bucket: Bucket) -> Tensor:
        """The slots of all rows of the bucket: the ones that nobody needs use the scratch slot."""
        return torch.nn.functional.pad(slots, (0, bucket.rows - len(slots)), value=self.scratch_slot)

    def padding(self, bucket: Bucket, inputs: Tensor) -> dict[str, Tensor]:
        """Buffers of a bucket, for inputs of this kind; every row in the scratch slot."""
        shape, kind = (bucket.rows, bucket.query, *inputs.shape[2:]), inputs.dtype
        return {
            "inputs": torch.zeros(shape, dtype=kind, device=self.device),
            "slots": torch.full((bucket.rows,), self.scratch_slot, device=self.device),
            "starts": torch.zeros(bucket.rows, dtype=torch.int64, device=self.device),
        }


class HeadShard(Half):
    """Embeddings and layers [0, split): token ids to hidden states at the cut."""

    @property
    def embedding(self) -> Tensor:
        """The embeddings' weights [vocab, hidden]."""
        return self._base.get_parameter(EMBEDDING)


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
        mode: Mode,
    ) -> None:
        super().__init__(base, config, family, capacity, eager=eager, mode=mode)
        self._lm_head = lm_head

    @property
    def num_weight_bytes(self) -> int:
        """As every half's, and the LM head's, unless it shares the embeddings."""
        shared = any(weight.data_ptr() == self._lm_head.weight.data_ptr() for weight in self._base.parameters())
        return super().num_weight_bytes + (0 if shared else self._lm_head.weight.nbytes)

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] to logits [n, vocab] in the half's dtype, with the model's own transform."""
        if self._decoder is not None:
            with current(self.device):
                return self._decoder.project(hidden, self._lm_head.weight)
        scores = torch.cat([self._lm_head(row[None]) for row in hidden]) if self._singly else self._lm_head(hidden)
        return transform_logits(scores, self._family, self.config)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`raw_logits` in float32."""
        return self.raw_logits(hidden).float()


class TailShard(_WithLMHead):
    """Layers [split, L), final norm and LM head: hidden states at the cut to hidden states after the final norm."""


class WholeModel(_WithLMHead):
    """All layers in one piece: a drafter, or a model that fits one machine."""

    @torch.inference_mode()
    def draft(
        self, pairs: Sequence[Sequence[int]], rows: Sequence[LogitRow], tables: SlotTables, *, steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """The loop of a draft at once, see `workers.engine.drafting.draft_recorded`; None if it is not recorded."""
        return None if self._graphs is None else draft_recorded(self, self._graphs, pairs, rows, tables, steps=steps)


def _wider(rows: Tensor, query: int) -> Tensor:
    """[rows, …] to [rows, query, …], zeros behind each row's own part."""
    if rows.shape[1] == query:
        return rows
    wider = rows.new_zeros(len(rows), query, *rows.shape[2:])
    wider[:, : rows.shape[1]] = rows
    return wider


def make_decoder(base: PreTrainedModel, config: PreTrainedConfig, cache: SlotCache, mode: Mode) -> Decoder | None:
    """Fused layers for a GPU that has tensor cores for them, and a model that they fit; else None."""
    device = cache.keys.device
    if (
        not (mode.graphs or mode.exact)
        or device.type != "cuda"
        or torch.cuda.get_device_capability(device) < FUSED_FROM
    ):
        return None
    from workers.engine.decoder import Decoder, fits  # only machines with a GPU have Triton

    return Decoder(base, config, cache, exact=mode.exact) if fits(base, config) else None


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one attention head's keys and values."""
    declared: int | None = config.to_dict().get("head_dim")
    return declared or config.hidden_size // config.num_attention_heads


def _cache_argument(base: PreTrainedModel) -> str:
    """The cache's name in the model's forward: `past_key_values` before transformers 5.24, then `cache`."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
