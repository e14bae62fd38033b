"""The layers of a model of the Llama kind as few, fused kernels, for a GPU.

It shares the weights of the library's own model, whose projections of queries, keys and values, and of gate and up,
become views of one tensor each. The library's model stays the reference: tests/unit/test_decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.engine.kernels.attention import PIECE, attend, rotate_and_store
from workers.engine.kernels.linear import add_rms_norm, linear, rms_norm, silu_mul
from workers.engine.kernels.tiles import Tiles
from workers.engine.kvcache import SlotCache

#: model types whose layers are what `Decoder` computes, as far as the config says nothing unusual
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

#: the number of queries that attention takes at once where their bits must not depend on how many come together
EXACT_QUERIES = 64


def fits(base: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether `Decoder` computes what `base` does."""
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    model: Any = base
    projections = {
        name: module for name, module in model.layers.named_modules() if name.rpartition(".")[2].endswith("_proj")
    }
    biased = {name.rpartition(".")[2] for name, module in projections.items() if module.bias is not None}
    return all(type(module) is nn.Linear for module in projections.values()) and biased <= {
        "q_proj",
        "k_proj",
        "v_proj",
    }


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; `qkv` and `gate_up` stand behind each other."""

    input_gain: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 · kv_heads) · dim, hidden]
    qkv_bias: Tensor | None
    #: of the RMS norms of queries and keys per head, and their eps
    head_gains: tuple[Tensor, Tensor, float] | None
    out: Tensor  # [hidden, heads · dim]
    post_gain: Tensor  # [hidden]
    gate_up: Tensor  # [2 · intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    window: int | None


class Decoder:
    """Runs all layers of a half over rows of its slot cache."""

    def __init__(
        self, base: PreTrainedModel, config: PreTrainedConfig, cache: SlotCache, *, exact: bool = False
    ) -> None:
        """`exact`: a token's bits depend on nothing but the tokens before it, at the price of some speed."""
        model: Any = base
        self._embedding = model.embed_tokens
        self._final_gain = None if isinstance(model.norm, nn.Identity) else model.norm.weight
        self._eps: float = config.rms_norm_eps
        self._scale: float = model.layers[0].self_attn.scaling
        self._layers = [_layer(layer, _window(config, number)) for number, layer in enumerate(model.layers)]
        self._cache = cache
        self._exact = exact
        self._tiles = Tiles.on(cache.keys.device, cache.keys.dtype)
        positions = torch.arange(cache.capacity, device=cache.keys.device)[None]
        cosines, sines = model.rotary_emb(torch.empty(0, device=cache.keys.device), positions)
        half = cosines.shape[-1] // 2
        self._cosines = cosines[0, :, :half].float().contiguous()
        self._sines = sines[0, :, :half].float().contiguous()

    def forward(self, inputs: Tensor, slots: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Tokens [rows, query], or hidden states with one more dimension, to hidden states [rows, query, hidden].

        Row r's token i stands at `starts[r]` + i of slot `slots[r]`; `starts[r]` + query is `longest` at most.
        """
        x = self._embedding(inputs) if inputs.dim() == 2 else inputs
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        gains = [layer.input_gain for layer in self._layers[1:]] + [self._final_gain]
        normed = rms_norm(x, self._layers[0].input_gain, self._eps)
        for number, (layer, following) in enumerate(zip(self._layers, gains, strict=True)):
            qkv = self._product(normed, layer.qkv, layer.qkv_bias, may_part=False)
            attended = self._attend(number, qkv, slots, starts, longest)
            x, normed = add_rms_norm(x, self._product(attended, layer.out), layer.post_gain, self._eps)
            gated = self._gated(normed, layer.gate_up)
            x, normed = add_rms_norm(x, self._product(gated, layer.down), following, self._eps)
        return normed.reshape(shape)

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`hidden` [n, hidden] times a weight such as the LM head's."""
        if self._exact:
            return linear(hidden, weight, self._tiles.exact())
        return nn.functional.linear(hidden, weight)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, may_part: bool = True) -> Tensor:
        """`x @ weight.T + bias`, if it may in parts that are still to be summed."""
        tile = self._tiles.exact() if self._exact else self._tiles.plain(len(x), *weight.shape, may_part=may_part)
        if tile is None:
            return nn.functional.linear(x, weight, bias)
        return linear(x, weight, tile, bias=bias)

    def _gated(self, x: Tensor, weight: Tensor) -> Tensor:
        tile = self._tiles.exact() if self._exact else self._tiles.gated(len(x), *weight.shape)
        if tile is None:
            return silu_mul(nn.functional.linear(x, weight))
        return linear(x, weight, tile, gated=True)

    def _attend(self, number: int, qkv: Tensor, slots: Tensor, starts: Tensor, longest: int) -> Tensor:
        layer, keys, values = self._layers[number], self._cache.keys[number], self._cache.values[number]
        query = rotate_and_store(qkv, self._cosines, self._sines, layer.head_gains, slots, starts, keys, values)
        return attend(
            query,
            keys,
            values,
            slots,
            starts,
            longest=longest,
            scale=self._scale,
            window=layer.window,
            queries=EXACT_QUERIES if self._exact else None,
            piece=PIECE if self._exact else None,
        )


def _layer(layer: Any, window: int | None) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    biases = [module.bias for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    gains = None
    if hasattr(attention, "q_norm"):
        norm = attention.q_norm
        gains = (norm.weight, attention.k_norm.weight, norm.variance_epsilon)
    return _Layer(
        input_gain=layer.input_layernorm.weight,
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        head_gains=gains,
        out=attention.o_proj.weight,
        post_gain=layer.post_attention_layernorm.weight,
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight,
        window=window,
    )


def _joined(linears: list[nn.Linear]) -> Tensor:
    """The layers' weights behind each other; theirs become views of it, so nothing is held twice."""
    joined = torch.cat([module.weight for module in linears])
    begin = 0
    for module in linears:
        end = begin + module.weight.shape[0]
        module.weight = nn.Parameter(joined[begin:end], requires_grad=False)
        begin = end
    return joined


def _window(config: PreTrainedConfig, number: int) -> int | None:
    """Positions that layer `number` sees; None: all."""
    values = config.to_dict()
    kinds = values.get("layer_types")
    if kinds is not None and kinds[number] != "sliding_attention":
        return None
    if config.model_type == "llama":
        return None
    window: int | None = values.get("sliding_window")
    return window
