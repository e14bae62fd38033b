"""What a model takes in memory, from its config alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from workers.engine.families import family_of
from workers.engine.loader import empty_base, torch_dtype
from workers.engine.quantization import BLOCK_SIZE, Quantization
from workers.engine.shard import head_dim

#: copies of a forward's logits in float32 that sampling holds at the same time
LOGIT_COPIES = 4
#: a table of 16 values goes with every tensor in nf4
_NF4_TABLE_BYTES = 16 * 4


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a model's parts. All decoder layers are of one size."""

    num_layers: int
    #: weights of one decoder layer, with the scales of quantised ones
    layer: int
    embeddings: int
    norm: int
    lm_head: int
    #: keys and values of one position in one layer
    position: int
    #: what a forward takes beside weights and cache: for each position of it in a layer, and in the LM head
    layer_activations: int
    logit_activations: int

    def head(self, split: int) -> int:
        """Weights of the head's half."""
        return self.embeddings + split * self.layer

    def tail(self, split: int) -> int:
        """Weights of the tail's half."""
        return (self.num_layers - split) * self.layer + self.norm + self.lm_head

    def whole(self, *, tied: bool) -> int:
        """Weights of the model in one piece; tied embeddings serve as LM head."""
        return self.head(self.num_layers) + self.norm + (0 if tied else self.lm_head)

    def slot(self, num_layers: int, positions: int) -> int:
        """The cache of one slot of so many positions in so many layers."""
        return num_layers * positions * self.position


def sizes_of(config: PreTrainedConfig, dtype: torch.dtype | str, quantization: Quantization) -> ModelSizes:
    """The sizes of a model of this text config; ModelUnsupported for a type that is not on the list."""
    family_of(config.model_type)
    width = torch_dtype(dtype).itemsize
    base, _ = empty_base(config, 0, 1, embeddings=True, final_norm=True, eager=True)
    parameters = {name: parameter.numel() for name, parameter in base.named_parameters()}
    embeddings = parameters["embed_tokens.weight"]
    norm = sum(count for name, count in parameters.items() if name.startswith("norm."))
    rest = sum(parameters.values()) - embeddings - norm
    linears = [module.weight for module in base.layers.modules() if isinstance(module, nn.Linear)]  # [out, in] each
    kept: int = rest - sum(weight.numel() for weight in linears)
    return ModelSizes(
        num_layers=config.num_hidden_layers,
        layer=kept * width + sum(_linear_bytes(weight, width, quantization) for weight in linears),
        embeddings=embeddings * width,
        norm=norm * width,
        lm_head=config.vocab_size * config.hidden_size * width,
        position=2 * config.num_key_value_heads * head_dim(config) * width,
        layer_activations=(8 * config.hidden_size + 3 * config.intermediate_size) * width,
        logit_activations=LOGIT_COPIES * 4 * config.vocab_size,
    )


def _linear_bytes(weight: Tensor, width: int, quantization: Quantization) -> int:
    """Bytes of one linear layer's weight [out, in]."""
    count = weight.numel()
    if quantization == "nf4":
        return -(-count // 2) + 4 * -(-count // BLOCK_SIZE) + _NF4_TABLE_BYTES
    if quantization == "int8":
        return count + 4 * weight.shape[0]
    return count * width
