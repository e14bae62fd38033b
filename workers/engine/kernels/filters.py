"""Filters of sampling on a GPU: top-k, top-p and min-p as one threshold for each row.

The threshold, be it the k-th best score or the score at the nucleus' edge, is found by halving the range of float32 bit
patterns, at most 32 passes over a row, instead of sorting it. Rows without a filter skip that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.choosing import Parameters

#: as `workers.engine.sampling.MIN_TEMPERATURE`
MIN_TEMPERATURE = tl.constexpr(1e-6)
#: token ids that a program looks at at once
_BLOCK = 4096
#: how far below the best score, which is a logit over the temperature, the edge of a filter is looked for first; then
#: twice and three times as far
_REACH = 4.0
#: and among how many tokens at most
_MOST_KEPT = 4096


@triton.jit
def _ordered(score):
    """Integers in the order of the floats they are made of; -inf is far below every finite one."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(pattern):
    """The float that `_ordered` made this integer of."""
    return tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits_at, ids, num_tokens, temperature):
    """A row's logits at `ids` over its temperature, -inf beyond the vocabulary."""
    logit = tl.load(logits_at + ids, mask=ids < num_tokens, other=float("-inf"))
    return logit.to(tl.float32) / temperature


@triton.jit
def _kth_best(scores_at, num, temperature, top_k, low, high, block: tl.constexpr):
    """The highest pattern in [low, high] that at least `top_k` of `num` scores reach."""
    lane = tl.arange(0, block)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        count = tl.full((), 0, tl.int32)
        for start in range(0, num, block):
            count += tl.sum((_ordered(_scores(scores_at, start + lane, num, temperature)) >= middle).to(tl.int32))
        if count >= top_k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _mass(scores_at, num, temperature, best, above, block: tl.constexpr):
    """The sum of exp(score - best) over the scores with patterns above `above`."""
    lane = tl.arange(0, block)
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, num, block):
        score = _scores(scores_at, start + lane, num, temperature)
        mass += tl.sum(tl.where(_ordered(score) > above, tl.exp(score - best), 0.0))
    return mass


@triton.jit
def _nucleus(scores_at, num, temperature, best, limit, low, high, block: tl.constexpr):
    """The lowest pattern in [low, high] above which the scores have less mass than `limit`, and how many of those
    that equal it the nucleus needs."""
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        if _mass(scores_at, num, temperature, best, middle, block) < limit:
            high = middle
        else:
            low = middle + 1
    missing = limit - _mass(scores_at, num, temperature, best, low, block)
    room = tl.ceil(missing / tl.exp(_unordered(low) - best))
    return low, tl.maximum(tl.minimum(room, 2147483000.0), 1.0).to(tl.int32)


@triton.jit
def _first_tied(logits_at, num_tokens, temperature, edge, room, block: tl.constexpr):
    """The lowest id of the `room` highest ones whose scores have the pattern `edge`."""
    lane = tl.arange(0, block)
    left = tl.full((), 0, tl.int32)
    right = left + num_tokens - 1
    while left < right:
        middle = (left + right + 1) >> 1
        count = tl.full((), 0, tl.int32)
        for start in range(0, num_tokens, block):
            ids = start + lane
            tied = (_ordered(_scores(logits_at, ids, num_tokens, temperature)) == edge) & (ids >= middle)
            count += tl.sum(tied.to(tl.int32))
        if count >= room:
            left = middle
        else:
            right = middle - 1
    return left


@triton.jit
def _edge(scores_at, num, temperature, best, mass, top_k, top_p, low, high, block: tl.constexpr):
    """The pattern in [low, high] at which the kept ones of `num` scores begin, and how many of those that equal it
    are kept; `mass` is that of all of the row."""
    room = tl.full((), 2147483647, tl.int32)
    if top_k > 0:
        low = _kth_best(scores_at, num, temperature, top_k, low, high, block)
        mass = _mass(scores_at, num, temperature, best, low - 1, block)
    if top_p < 1.0:
        low, room = _nucleus(scores_at, num, temperature, best, top_p * mass, low, high, block)
    return low, room


@triton.jit
def _within(logits_at, num_tokens, temperature, best, reach, top_k, top_p, most, block: tl.constexpr):
    """The mass of a row, and the first of one, two and three times the reach below its best score within which the
    edge lies and at most `most` tokens; 4 if none."""
    lane = tl.arange(0, block)
    times = tl.arange(0, 4) + 1
    counts = tl.zeros((4,), tl.int32)
    masses = tl.zeros((4,), tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, block):
        score = _scores(logits_at, start + lane, num_tokens, temperature)
        chance = tl.exp(score - best)
        mass += tl.sum(chance)
        for number in tl.static_range(1, 4):
            inside = score >= best - number * reach
            counts += tl.where(times == number, tl.sum(inside.to(tl.int32)), 0)
            masses += tl.where(times == number, tl.sum(tl.where(inside, chance, 0.0)), 0.0)
    # with top_k the nucleus is one of its tokens, which are all inside
    needed = tl.where((top_p >= 1.0) | (top_k > 0), -1.0, top_p * mass)
    fits = (counts <= most) & (counts >= tl.maximum(top_k, 1)) & (needed < masses * 0.999)
    return mass, tl.min(tl.where(fits, times, 4), axis=0)


@triton.jit
def _collect(logits_at, num_tokens, temperature, lowest, kept_at, block: tl.constexpr):
    """Store the scores from `lowest` on; how many there are."""
    lane = tl.arange(0, block)
    num_kept = tl.full((), 0, tl.int32)
    for start in range(0, num_tokens, block):
        score = _scores(logits_at, start + lane, num_tokens, temperature)
        stays = score >= lowest
        tl.store(kept_at + num_kept + tl.cumsum(stays.to(tl.int32), axis=0) - 1, score, mask=stays)
        num_kept += tl.sum(stays.to(tl.int32))
    tl.debug_barrier()  # other threads will read what this one stored
    return num_kept


@triton.jit
def _num_equal(logits_at, num_tokens, temperature, pattern, block: tl.constexpr):
    lane = tl.arange(0, block)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_tokens, block):
        count += tl.sum((_ordered(_scores(logits_at, start + lane, num_tokens, temperature)) == pattern).to(tl.int32))
    return count


@triton.jit
def _cut(
    logits_at,
    temperature_at,
    top_k_at,
    top_p_at,
    min_p_at,
    kept_at,
    threshold_at,
    first_id_at,
    stride,
    num_tokens,
    reach: tl.constexpr,
    most_kept: tl.constexpr,
    block: tl.constexpr,
):
    """The score below which a row's tokens fall out, and the lowest id that stays of those that equal it.

    Nearly always the answer lies not far below the best score, where few tokens are: these are collected, and the range
    is halved over them. Else over the whole row.
    """
    row = tl.program_id(0)
    logits_at += row.to(tl.int64) * stride
    kept_at += row * most_kept
    temperature = tl.load(temperature_at + row)
    top_k = tl.load(top_k_at + row)
    top_p = tl.load(top_p_at + row)
    min_p = tl.load(min_p_at + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    first_id = tl.full((), 0, tl.int32)
    if (temperature > MIN_TEMPERATURE) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        lane = tl.arange(0, block)
        best = tl.full((), float("-inf"), tl.float32)
        for start in range(0, num_tokens, block):
            best = tl.maximum(best, tl.max(_scores(logits_at, start + lane, num_tokens, temperature)))
        high = _ordered(best)
        if (top_k > 0) | (top_p < 1.0):
            mass, times = _within(logits_at, num_tokens, temperature, best, reach, top_k, top_p, most_kept, block)
            lowest = best - times.to(tl.float32) * reach
            if times < 4:
                num = _collect(logits_at, num_tokens, temperature, lowest, kept_at, block)
                low, room = _edge(kept_at, num, 1.0, best, mass, top_k, top_p, _ordered(lowest), high, block)
            else:
                bottom = _ordered(tl.full((), float("-inf"), tl.float32))
                low, room = _edge(logits_at, num_tokens, temperature, best, mass, top_k, top_p, bottom, high, block)
            if _num_equal(logits_at, num_tokens, temperature, low, block) > room:
                first_id = _first_tied(logits_at, num_tokens, temperature, low, room, block)
            threshold = _unordered(low)
        least = best + tl.log(tl.where(min_p > 0.0, min_p, 1.0))
        if (min_p > 0.0) & (least > threshold):
            threshold = least
            first_id = tl.full((), 0, tl.int32)
    tl.store(threshold_at + row, threshold)
    tl.store(first_id_at + row, first_id)


def thresholds(logits: Tensor, rows: Parameters, *, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Where each row's filters cut.

    Args:
        logits: [n, vocab], any float dtype, on a GPU.
        rows: the rows' parameters.
        num_tokens: ids from here on are padding.

    Returns:
        The score (logit over temperature), float32 [n], below which tokens fall out, and the lowest id, int32 [n], that
        stays of those that equal it.
    """
    n, stride = logits.shape
    threshold = torch.empty(n, dtype=torch.float32, device=logits.device)
    first_id = torch.empty(n, dtype=torch.int32, device=logits.device)
    _cut[(n,)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        torch.empty((n, _MOST_KEPT), dtype=torch.float32, device=logits.device),
        threshold,
        first_id,
        stride,
        num_tokens,
        reach=_REACH,
        most_kept=_MOST_KEPT,
        block=_BLOCK,
        num_warps=8,
    )
    return threshold, first_id
