"""The models that are measured: real shapes, dummy weights (`workers.engine.dummy`), a tokenizer of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, Qwen2Config

from tests.models import EOS_ID, byte_tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 model's sizes."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> Qwen2Config:
        """The library's config of this shape."""
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=self.tied,
            eos_token_id=EOS_ID,
        )

    def write(self, directory: Path) -> Path:
        """Config and tokenizer, no weights, as a model directory; returns it."""
        path = directory / self.name
        self.config().save_pretrained(path)
        ends = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=256)  # type: ignore[no-untyped-call]
        ends.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
        return path


@dataclass(frozen=True, slots=True)
class Shapes:
    """The three models of a run."""

    drafter: Shape
    target: Shape
    #: the one that is measured in NF4
    large: Shape


REAL = Shapes(
    # The real one's embeddings are tied. An LM head of its own is read as often and lets the dummy draft what the dummy
    # target says: what is accepted then stands in the drafter's cache, as with a real pair.
    drafter=Shape("0.5B", 24, 896, 4864, 14, 2, 151_936, tied=False),
    target=Shape("7B", 28, 3584, 18_944, 28, 4, 152_064, tied=False),
    large=Shape("14B", 48, 5120, 13_824, 40, 8, 152_064, tied=False),
)
#: for a rehearsal on the CPU
TINY = Shapes(
    drafter=Shape("tiny-drafter", 2, 64, 128, 4, 2, 512, tied=False),
    target=Shape("tiny-target", 4, 64, 128, 4, 2, 520, tied=False),
    large=Shape("tiny-large", 6, 64, 128, 4, 2, 520, tied=False),
)
