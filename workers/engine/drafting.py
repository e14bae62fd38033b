"""The whole loop of a draft in one recorded computation: from the last two committed tokens to the last drafted one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relay.messages import Sampling
from workers.engine.choosing import Parameters, choose_rows, has_filter
from workers.engine.graphs import Bucket, Graphs

if TYPE_CHECKING:
    from workers.engine.shard import WholeModel


def draft_recorded(
    model: WholeModel,
    graphs: Graphs,
    pairs: Sequence[Sequence[int]],
    slots: Sequence[int],
    starts: Sequence[int],
    rows: Sequence[Sampling],
    *,
    steps: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Draft `steps` tokens for every row, each fed to find the next.

    Args:
        model: with `graphs`.
        pairs: one or two tokens of each row, the last one its base token.
        slots: of the model's cache.
        starts: the absolute position of each row's first token here.
        rows: how their tokens are chosen.
        steps: tokens wanted; rounded up to a power of two, so the model's cache needs places for that.
        num_tokens: ids from here on are never drafted.

    Returns:
        Tokens, int64 [steps, rows], and the drafter's own probability of each, float32; on the CPU.
    """
    most = 1 << (steps - 1).bit_length()
    longest = max(start + len(pair) for start, pair in zip(starts, pairs, strict=True)) + most - 1
    bucket = model.bucket(len(pairs), 2, longest)
    cuts = any(map(has_filter, rows))
    graph = graphs.get(
        ("draft", bucket, most, cuts),
        lambda: _buffers(model, bucket),
        lambda **inputs: _draft(model, bucket.longest, most, num_tokens, cuts, **inputs),
    )
    outputs = graph.run(
        inputs=torch.tensor([[*pair, 0][:2] for pair in pairs], dtype=torch.int64),
        slots=model.with_scratch(torch.tensor(slots, dtype=torch.int64), bucket),
        starts=torch.tensor(starts, dtype=torch.int64),
        last=torch.tensor([len(pair) - 1 for pair in pairs], dtype=torch.int64),
        **Parameters.of(rows).tensors(),
    )
    tokens, confidence = outputs["drafted"].cpu().unbind(0)
    kept = slice(steps), slice(len(pairs))
    return tokens[kept], confidence.view(torch.float64)[kept].float()


def _buffers(model: WholeModel, bucket: Bucket) -> dict[str, Tensor]:
    buffers = model.padding(bucket, torch.zeros(1, 2, dtype=torch.int64))
    last = torch.ones(bucket.rows, dtype=torch.int64, device=model.device)
    return {**buffers, "last": last, **Parameters.greedy(bucket.rows, model.device).tensors()}


def _draft(
    model: WholeModel,
    longest: int,
    steps: int,
    num_tokens: int,
    cuts: bool,
    *,
    inputs: Tensor,
    slots: Tensor,
    starts: Tensor,
    last: Tensor,
    **parameters: Tensor,
) -> dict[str, Tensor]:
    """The loop itself, on the device."""
    rows, places = Parameters(**parameters), starts + last
    hidden = model.run(inputs, slots, starts, longest)  # [rows, 2, hidden]
    ends = torch.arange(len(slots), device=slots.device) * 2 + last
    hidden = hidden.flatten(0, 1).index_select(0, ends)
    tokens, confidence = [], []
    for step in range(steps):
        chosen = choose_rows(model.raw_logits(hidden), rows, places + 1, num_tokens=num_tokens, cuts=cuts)
        tokens.append(chosen.tokens)
        confidence.append(chosen.confidence)
        if step < steps - 1:
            places = places + 1
            hidden = model.run(chosen.tokens[:, None], slots, places, longest)[:, 0]
    # one tensor, so that one copy brings all to the host
    bits = torch.stack(confidence).double().view(torch.int64)
    return {"drafted": torch.stack((torch.stack(tokens), bits))}
