"""Choosing tokens on a GPU: the rule of `workers.engine.sampling`, with shapes that depend on no value.

Rows without a filter skip that, greedy rows skip the noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.choosing import Chosen, Parameters
from workers.engine.kernels.filters import MIN_TEMPERATURE, thresholds
from workers.engine.kernels.noise import gumbel

#: token ids that a program looks at at once
_BLOCK = 4096


@triton.jit
def _choose_part(
    logits_at,
    temperature_at,
    seed_at,
    position_at,
    threshold_at,
    first_id_at,
    best_at,
    token_at,
    peak_at,
    mass_at,
    stride,
    num_tokens,
    num_parts: tl.constexpr,
    has_cuts: tl.constexpr,
    has_barred: tl.constexpr,
    block: tl.constexpr,
):
    """The best token of one part of one row's vocabulary; and peak and mass of its own logits."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    is_token = ids < num_tokens
    temperature = tl.load(temperature_at + row)
    logit = tl.load(logits_at + row.to(tl.int64) * stride + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    score = logit
    if temperature > MIN_TEMPERATURE:
        score = logit / temperature
        if has_cuts:
            threshold = tl.load(threshold_at + row)
            first_id = tl.load(first_id_at + row)
            stays = (score > threshold) | ((score == threshold) & (ids >= first_id))
            score = tl.where(stays, score, float("-inf"))
        score += gumbel(tl.load(seed_at + row), tl.load(position_at + row), ids)
    score = tl.where(is_token, score, float("-inf"))
    place = row * num_parts + part
    best = tl.max(score, axis=0)
    tl.store(best_at + place, best)
    tl.store(token_at + place, tl.min(tl.where(score == best, ids, 2147483647), axis=0))
    # a sum is no number if one of its parts is none; infinities are made so
    counts = is_token
    if has_barred:
        counts = counts & (logit > float("-inf"))
    broken = tl.sum(tl.where(counts, logit - logit, 0.0), axis=0)
    # a part that is barred as a whole has no peak to subtract
    peak = tl.max(logit, axis=0)
    ground = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peak_at + place, peak)
    tl.store(mass_at + place, tl.sum(tl.exp(logit - ground), axis=0) + broken)


@triton.jit
def _choose(
    logits_at,
    best_at,
    token_at,
    peak_at,
    mass_at,
    chosen_at,
    confidence_at,
    finite_at,
    stride,
    num_tokens,
    num_parts: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.arange(0, block)
    is_part = part < num_parts
    place = row * num_parts + part
    best = tl.load(best_at + place, mask=is_part, other=float("-inf"))
    token = tl.load(token_at + place, mask=is_part, other=2147483647)
    chosen = tl.min(tl.where(best == tl.max(best, axis=0), token, 2147483647), axis=0)
    # rows of no numbers have no best token; the vocabulary's first keeps addresses inside it
    chosen = tl.where(chosen < num_tokens, chosen, 0)
    peak = tl.load(peak_at + place, mask=is_part, other=float("-inf"))
    mass = tl.load(mass_at + place, mask=is_part, other=0.0)
    top = tl.max(peak, axis=0)
    total = tl.sum(tl.where(is_part, mass * tl.exp(peak - top), 0.0), axis=0)
    logit = tl.load(logits_at + row.to(tl.int64) * stride + chosen).to(tl.float32)
    confidence = tl.exp(logit - top) / total
    tl.store(chosen_at + row, chosen.to(tl.int64))
    tl.store(confidence_at + row, confidence)
    tl.store(finite_at + row, confidence == confidence)


def choose(
    logits: Tensor, rows: Parameters, positions: Tensor, *, num_tokens: int, cuts: bool, barred: bool = False
) -> Chosen:
    """`workers.engine.choosing.choose_rows` on a GPU; `barred`: some logits may be -inf, which is no fault then."""
    n, stride = logits.shape
    device, num_parts = logits.device, triton.cdiv(num_tokens, _BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if cuts:
        threshold, first_id = thresholds(logits, rows, num_tokens=num_tokens)
    else:
        threshold, first_id = empty(n), empty(n, dtype=torch.int32)
    best, token = empty(n, num_parts), empty(n, num_parts, dtype=torch.int32)
    peak, mass = empty(n, num_parts), empty(n, num_parts)
    _choose_part[(n, num_parts)](
        logits,
        rows.temperature,
        rows.seed,
        positions,
        threshold,
        first_id,
        best,
        token,
        peak,
        mass,
        stride,
        num_tokens,
        num_parts=num_parts,
        has_cuts=cuts,
        has_barred=barred,
        block=_BLOCK,
        num_warps=8,
    )
    result = Chosen(empty(n, dtype=torch.int64), empty(n), empty(n, dtype=torch.bool))
    _choose[(n,)](
        logits,
        best,
        token,
        peak,
        mass,
        result.tokens,
        result.confidence,
        result.finite,
        stride,
        num_tokens,
        num_parts=num_parts,
        block=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return result
