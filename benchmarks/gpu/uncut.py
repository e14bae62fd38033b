"""The library's own model in one piece: what shardq's texts must equal, and what its speed is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from workers.engine.dummy import DummyWeights
from workers.engine.loader import load_config

#: two scores nearer than this may change places with the shapes of the matrices, in float32 too
NEAR_TIE = 1e-3


def quieten() -> None:
    """No progress bars, no warnings."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def stored_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a directory with its weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.to(device).eval()


def dummy_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a directory with the weights of `workers.engine.dummy`."""
    config = load_config(directory)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    weights = DummyWeights(config)
    wanted = {name: name for name in weights.names}
    model.load_state_dict(dict(weights.read(wanted, dtype, device)), strict=False, assign=True)
    model.tie_weights()
    return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy text, and the smallest distance between its best two scores."""

    tokens: tuple[int, ...]
    gap: float


def greedy_config(max_tokens: int, eos: Sequence[int] = (), **more: Any) -> GenerationConfig:
    """Not the checkpoint's sampling defaults: nothing but an end."""
    # `generate` takes None for the checkpoint's own
    ends = {"eos_token_id": list(eos) or [-1], "pad_token_id": 0, "bos_token_id": 0}
    return GenerationConfig(do_sample=False, max_new_tokens=max_tokens, **ends, **more)  # type: ignore[no-untyped-call]


@torch.inference_mode()
def reference(model: Any, prompt: Sequence[int], max_tokens: int, eos: Sequence[int]) -> Reference:
    """What `generate` says after one prompt."""
    config = greedy_config(max_tokens, eos, output_logits=True, return_dict_in_generate=True)
    tokens = torch.tensor([list(prompt)], device=model.device)
    result = model.generate(tokens, generation_config=config, attention_mask=torch.ones_like(tokens))
    text = tuple(result.sequences[0, len(prompt) :].tolist())
    best = torch.stack([logits[0].topk(2).values for logits in result.logits])
    return Reference(text, float((best[:, 0] - best[:, 1]).min()))
