"""How fast a device is at a model's layers and LM head: a short measurement with made-up weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from workers.engine.families import family_of
from workers.engine.loader import attends_eagerly, empty_base, fill, torch_dtype
from workers.engine.quantization import Quantization, replace_linears
from workers.engine.shard import Capacity, Mode, TailShard

#: the forward that is timed: rows, and tokens of each
ROWS, QUERY = 8, 4
#: rows of the LM head that are timed; the time of all of them is in proportion
LM_HEAD_ROWS = 8192
WARM_UPS, REPEATS = 2, 5


class Pace(NamedTuple):
    """Seconds of a round of `ROWS` rows."""

    layer_s: float
    lm_head_s: float


def measure_pace(
    config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device | str, quantization: Quantization
) -> Pace:
    """Time one decoder layer and the LM head; needs the memory of one layer and a bit of LM head for a moment."""
    shard = _one_layer(config, torch_dtype(dtype), torch.device(device), quantization)
    hidden = torch.full((ROWS, QUERY, shard.hidden_size), 0.01, dtype=shard.dtype, device=shard.device)
    slots = torch.arange(ROWS, device=shard.device)
    starts = torch.zeros(ROWS, dtype=torch.int64, device=shard.device)
    layer_s = _seconds(lambda: shard.forward(hidden, slots, starts), shard.device)
    logits_s = _seconds(lambda: shard.logits(hidden.flatten(0, 1)), shard.device)
    return Pace(layer_s, logits_s * config.vocab_size / _rows(config))


def _one_layer(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, quantization: Quantization
) -> TailShard:
    family = family_of(config.model_type)
    eager = attends_eagerly(config, family)
    base, short = empty_base(config, 0, 1, embeddings=False, final_norm=True, eager=eager)
    replace_linears(base, quantization, dtype)
    fill(base, _made_up(base, dtype, device), device)
    lm_head = nn.Linear(config.hidden_size, _rows(config), bias=False, dtype=dtype, device=device)
    return TailShard(base, lm_head, short, family, Capacity(ROWS, QUERY, QUERY), eager=eager, mode=Mode())


def _made_up(base: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in base.state_dict().items():
        yield name, torch.full(parameter.shape, 0.01, dtype=dtype, device=device)


def _rows(config: PreTrainedConfig) -> int:
    return min(LM_HEAD_ROWS, int(config.vocab_size))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The usual time of a piece of work on a device."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[WARM_UPS:])
