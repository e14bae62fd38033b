"""The whole loop of a draft in one recorded computation: from the last two committed tokens to the last drafted one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.engine.choosing import Context, Needs, Parameters, choose_rows
from workers.engine.graphs import Bucket, Graphs, Key
from workers.engine.processors import LogitRow
from workers.engine.slottables import SlotTables

if TYPE_CHECKING:
    from workers.engine.shard import WholeModel


def draft_recorded(
    model: WholeModel,
    graphs: Graphs,
    pairs: Sequence[Sequence[int]],
    rows: Sequence[LogitRow],
    tables: SlotTables,
    *,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Draft `steps` tokens for every row, each fed to find the next.

    Args:
        model: with `graphs`.
        pairs: the last one or two tokens of each row.
        rows: where each row's first drafted token belongs.
        tables: for the rows' processors; tokens that they have no column for are never drafted.
        steps: tokens wanted; rounded up to a power of two, so the model's cache needs places for that.

    Returns:
        Tokens, int64 [steps, rows], and the drafter's own probability of each, float32; on the CPU.
    """
    most = 1 << (steps - 1).bit_length()
    bucket = model.bucket(len(pairs), 2, max(row.position for row in rows) + most - 1)
    needs = Needs.of(rows)
    graph = graphs.get(
        Key("draft", bucket, (most, needs, tables, tables.allocated)),
        lambda: _buffers(model, bucket),
        lambda **inputs: _draft(model, tables, bucket.longest, most, needs, **inputs),
    )
    outputs = graph.run(
        inputs=torch.tensor([[*pair, 0][:2] for pair in pairs], dtype=torch.int64),
        slots=model.with_scratch(torch.tensor([row.slot for row in rows], dtype=torch.int64), bucket),
        starts=torch.tensor([row.position - len(pair) for row, pair in zip(rows, pairs, strict=True)]),
        last=torch.tensor([len(pair) - 1 for pair in pairs], dtype=torch.int64),
        **Parameters.news(graph, [row.sampling for row in rows]),
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
    tables: SlotTables,
    longest: int,
    steps: int,
    needs: Needs,
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
    tokens: list[Tensor] = []
    confidence: list[Tensor] = []
    for step in range(steps):
        context = Context(tables, slots, torch.stack(tokens, dim=1) if tokens else None)
        logits = model.raw_logits(hidden)
        chosen = choose_rows(logits, rows, places + 1, needs, context, num_tokens=tables.vocab_size)
        tokens.append(chosen.tokens)
        confidence.append(chosen.confidence)
        if step < steps - 1:
            places = places + 1
            hidden = model.run(chosen.tokens[:, None], slots, places, longest)[:, 0]
    # one tensor, so that one copy brings all to the host
    bits = torch.stack(confidence).double().view(torch.int64)
    return {"drafted": torch.stack((torch.stack(tokens), bits))}
