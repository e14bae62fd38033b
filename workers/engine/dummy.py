"""Random weights of a model's real shapes, made on the device: speed can be measured without a checkpoint.

What such a model computes costs what the real one costs, but what it says is known beforehand. Whatever attention and
MLP add to the residual stream is tiny, so that a token's hidden state stays its embedding, and row `j` of the LM head
is the embedding of token `j - 1`: after token `t` comes `t + 1`. With tied embeddings `t` comes again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from workers.engine.checkpoint import EMBEDDING, LM_HEAD

#: what layers add to the residual stream, as a part of it
_RESIDUAL_PART = 1e-2
#: the projections whose output is added to the residual stream
_OUTPUTS = ("o_proj.weight", "down_proj.weight")


class DummyWeights:
    """The tensors of one model. Equal on every machine with the same type of device: each is seeded by its name."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """`config` is the whole text model's."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            self._shapes.pop(LM_HEAD, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that a checkpoint of this model would hold."""
        return tuple(self._shapes)

    def read(self, wanted: Mapping[str, str], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """As `workers.engine.checkpoint.read_tensors`: (new name, tensor) for every name -> new name."""
        for stored, name in wanted.items():
            yield name, self._tensor(stored, dtype, device)

    def _tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(LM_HEAD):
            (embedding,) = (other for other in self._shapes if other.endswith(EMBEDDING))
            return self._tensor(embedding, dtype, device).roll(1, dims=0)
        if len(shape) == 1:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(_seed(name))
        tensor = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        if name.endswith(EMBEDDING):
            return tensor
        part = _RESIDUAL_PART if name.endswith(_OUTPUTS) else 1.0
        return tensor.mul_(part / shape[-1] ** 0.5)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
