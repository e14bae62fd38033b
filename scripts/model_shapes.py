"""Published shapes of models that `docs/models.md` has recipes for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, as its `config.json` on the hub says them."""

    hub_id: str
    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    def config(self) -> PreTrainedConfig:
        """The library's config of this shape."""
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
        }
        own = {} if self.kind == "qwen2" else {"head_dim": self.head_dim}
        config: PreTrainedConfig = AutoConfig.for_model(self.kind, **sizes, **own)
        return config


QWEN25_05B = Shape("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 24, 896, 4864, 14, 2, 64, 151_936, tied=True)
QWEN25_7B = Shape("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 3584, 18_944, 28, 4, 128, 152_064)
QWEN25_14B = Shape("Qwen/Qwen2.5-14B-Instruct", "qwen2", 48, 5120, 13_824, 40, 8, 128, 152_064)
QWEN3_06B = Shape("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, tied=True)
QWEN3_8B = Shape("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12_288, 32, 8, 128, 151_936)
QWEN3_14B = Shape("Qwen/Qwen3-14B", "qwen3", 40, 5120, 17_408, 40, 8, 128, 151_936)
LLAMA32_1B = Shape("meta-llama/Llama-3.2-1B-Instruct", "llama", 16, 2048, 8192, 32, 8, 64, 128_256, tied=True)
LLAMA31_8B = Shape("meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 4096, 14_336, 32, 8, 128, 128_256)
MISTRAL_7B = Shape("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 32, 4096, 14_336, 32, 8, 128, 32_768)
