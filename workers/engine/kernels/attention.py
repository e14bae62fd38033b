"""Attention of ragged rows over the slot cache: every key and value is read once per group of heads, and none beyond
a row's own end.

The keys of a row are cut into pieces; each is one program, and `_join` puts a query's pieces together in their order
(flash-decoding: Dao et al. 2023). Pieces begin at multiples of their length, so with a fixed one a query's result
depends on nothing but the keys and values before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: cache positions that one program reads, where there are many programs
PIECE = 256
#: of them at once
_BLOCK = 64
#: elements of all pieces together, float32: many queries have work for the whole chip with few pieces
_MOST_PIECED = 64 << 20
#: programs that keep an H200's 132 multiprocessors reading
_ENOUGH_PROGRAMS = 800
#: pieces that are put together at once
_JOINED = 8
#: queries of a group of heads that one program takes at most; in float32, where a large tile takes the compiler seconds
_MOST_QUERIES, _MOST_QUERIES_FLOAT32 = 64, 16

_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["query_length"])
def _rotate_and_store(
    qkv_at,
    cosines_at,
    sines_at,
    q_gain_at,
    k_gain_at,
    slots_at,
    starts_at,
    query_at,
    keys_at,
    values_at,
    query_length,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    capacity: tl.constexpr,
    half: tl.constexpr,
    eps: tl.constexpr,
    has_gains: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots_at + token // query_length).to(tl.int64)
    position = tl.load(starts_at + token // query_length).to(tl.int64) + token % query_length
    d = tl.arange(0, block)
    is_dim = d < half
    source = qkv_at + token.to(tl.int64) * (heads + 2 * kv_heads) * 2 * half + head * 2 * half
    low = tl.load(source + d, mask=is_dim, other=0.0).to(tl.float32)
    high = tl.load(source + half + d, mask=is_dim, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        if has_gains:
            factor = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / (2 * half) + eps)
            if head < heads:
                low *= factor * tl.load(q_gain_at + d, mask=is_dim, other=0.0).to(tl.float32)
                high *= factor * tl.load(q_gain_at + half + d, mask=is_dim, other=0.0).to(tl.float32)
            else:
                low *= factor * tl.load(k_gain_at + d, mask=is_dim, other=0.0).to(tl.float32)
                high *= factor * tl.load(k_gain_at + half + d, mask=is_dim, other=0.0).to(tl.float32)
        cosine = tl.load(cosines_at + position * half + d, mask=is_dim, other=0.0)
        sine = tl.load(sines_at + position * half + d, mask=is_dim, other=0.0)
        turned = low * cosine - high * sine
        high = high * cosine + low * sine
        low = turned
    if head < heads:
        target = query_at + (token.to(tl.int64) * heads + head) * 2 * half
    elif head < heads + kv_heads:
        target = keys_at + ((slot * kv_heads + head - heads) * capacity + position) * 2 * half
    else:
        target = values_at + ((slot * kv_heads + head - heads - kv_heads) * capacity + position) * 2 * half
    tl.store(target + d, low.to(query_at.dtype.element_ty), mask=is_dim)
    tl.store(target + half + d, high.to(query_at.dtype.element_ty), mask=is_dim)


def rotate_and_store(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    gains: tuple[Tensor, Tensor, float] | None,
    slots: Tensor,
    starts: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Turn queries and keys by their positions, write keys and values into the cache, return the queries.

    Args:
        qkv: [rows · query, (heads + 2 · kv_heads) · dim]; token i of row r at absolute position `starts[r]` + i.
        cosines, sines: float32 [positions, dim / 2].
        gains: of the RMS norms of queries and keys per head, [dim] each, and their eps.
        slots, starts: int64 [rows].
        keys, values: one layer's cache, [slots + 1, kv_heads, capacity, dim].

    Returns:
        [rows · query, heads, dim].
    """
    _, kv_heads, capacity, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_gain, k_gain, eps = gains or (qkv, qkv, 0.0)
    _rotate_and_store[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv,
        cosines,
        sines,
        q_gain,
        k_gain,
        slots,
        starts,
        query,
        keys,
        values,
        qkv.shape[0] // slots.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        capacity=capacity,
        half=dim // 2,
        eps=eps,
        has_gains=gains is not None,
        block=triton.next_power_of_2(dim // 2),
        num_warps=1,
    )
    return query


@triton.jit(do_not_specialize=["query_length", "num_pieces", "piece"])
def _attend(
    query_at,
    keys_at,
    values_at,
    slots_at,
    starts_at,
    out_at,
    pieces_at,
    logs_at,
    query_length,
    num_pieces,
    piece,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    capacity: tl.constexpr,
    dim: tl.constexpr,
    window: tl.constexpr,
    scale: tl.constexpr,
    is_whole: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    row = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    number = tl.program_id(2)
    slot = tl.load(slots_at + row).to(tl.int64)
    begin = tl.load(starts_at + row).to(tl.int32)
    # A group's queries stand behind each other: entry m is head m % group of token m // group.
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    token = m // group
    is_query = token < query_length
    position = begin + token
    last = begin + tl.minimum((tl.program_id(1) * block_m + block_m - 1) // group, query_length - 1)
    first = begin + (tl.program_id(1) * block_m) // group
    low = number * piece
    high = tl.minimum(low + piece, last + 1)
    if window > 0:
        low = tl.maximum(low, ((first - window + 1) // block_n) * block_n)
    d = tl.arange(0, block_d)
    heads = group * kv_heads
    entry = (row.to(tl.int64) * query_length + token) * heads + kv_head * group + m % group
    if low < high:
        mask_q = is_query[:, None] & (d[None, :] < dim)
        query = tl.load(query_at + entry[:, None] * dim + d[None, :], mask=mask_q, other=0.0)
        base = (slot * kv_heads + kv_head) * capacity
        best = tl.full((block_m,), float("-inf"), tl.float32)
        total = tl.zeros((block_m,), tl.float32)
        acc = tl.zeros((block_m, block_d), tl.float32)
        for start in range(low, high, block_n):
            n = start + tl.arange(0, block_n)
            mask_n = (n[:, None] < high) & (d[None, :] < dim)
            place = (base + n.to(tl.int64))[:, None] * dim + d[None, :]
            key = tl.load(keys_at + place, mask=mask_n, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            seen = (n[None, :] <= position[:, None]) & (n[None, :] < high)
            if window > 0:
                seen = seen & (n[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, axis=1))
            # a query that has seen nothing yet has no maximum to subtract
            ground = tl.where(new_best == float("-inf"), 0.0, new_best)
            weight = tl.exp2(score - ground[:, None])
            fade = tl.exp2(best - ground)
            total = total * fade + tl.sum(weight, axis=1)
            value = tl.load(values_at + place, mask=mask_n, other=0.0)
            acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            best = new_best
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if is_whole:
            tl.store(out_at + entry[:, None] * dim + d[None, :], result.to(out_at.dtype.element_ty), mask=mask_q)
        else:
            spot = entry * num_pieces + number
            tl.store(pieces_at + spot[:, None] * dim + d[None, :], result, mask=mask_q)
            tl.store(logs_at + spot, tl.where(total == 0.0, float("-inf"), best + tl.log2(total)), mask=is_query)
    elif not is_whole:
        tl.store(logs_at + entry * num_pieces + number, tl.full((block_m,), float("-inf"), tl.float32), mask=is_query)


@triton.jit(do_not_specialize=["num_pieces"])
def _join(
    pieces_at,
    logs_at,
    out_at,
    num_pieces,
    dim: tl.constexpr,
    block_p: tl.constexpr,
    block_d: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, block_d)
    best = tl.full((), float("-inf"), tl.float32)
    for start in range(0, num_pieces, block_p):
        p = start + tl.arange(0, block_p)
        logs = tl.load(logs_at + entry * num_pieces + p, mask=p < num_pieces, other=float("-inf"))
        best = tl.maximum(best, tl.max(logs, axis=0))
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((block_d,), tl.float32)
    for start in range(0, num_pieces, block_p):
        p = start + tl.arange(0, block_p)
        logs = tl.load(logs_at + entry * num_pieces + p, mask=p < num_pieces, other=float("-inf"))
        weight = tl.exp2(logs - best)
        # a piece behind the query's end was never written
        mask = (logs > float("-inf"))[:, None] & (d[None, :] < dim)
        piece = tl.load(pieces_at + (entry * num_pieces + p)[:, None] * dim + d[None, :], mask=mask, other=0.0)
        total += tl.sum(weight, axis=0)
        acc += tl.sum(weight[:, None] * piece, axis=0)
    tl.store(out_at + entry * dim + d, (acc / total).to(out_at.dtype.element_ty), mask=d < dim)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None,
    queries: int | None = None,
    piece: int | None = None,
) -> Tensor:
    """Causal attention of every row over its own slot.

    Args:
        query: [rows · query, heads, dim]; token i of row r at absolute position `starts[r]` + i.
        keys, values: one layer's cache, [slots + 1, kv_heads, capacity, dim]; the rows' own are in it already.
        slots, starts: int64 [rows].
        longest: `starts[r]` + query is this at most; decides how many programs are started, nothing else.
        scale: of the scores.
        window: positions that a query sees, its own included; None: all.
        queries: entries that a program takes at once; None: as many as there are, up to a limit. A query's result
            may depend on it, but not on the other queries.
        piece: positions that a program reads, a multiple of 64; None: fewer where there are few programs.

    Returns:
        [rows · query, heads · dim].
    """
    tokens, heads, dim = query.shape
    rows, (_, kv_heads, capacity, _) = slots.shape[0], keys.shape
    group, length = heads // kv_heads, tokens // rows
    if piece is None:
        piece = PIECE
        while piece > _BLOCK and rows * kv_heads * triton.cdiv(longest, piece) < _ENOUGH_PROGRAMS:
            piece //= 2
        while tokens * heads * dim * triton.cdiv(longest, piece) > _MOST_PIECED and piece < longest:
            piece *= 2
    num_pieces = triton.cdiv(longest, piece)
    most = _MOST_QUERIES_FLOAT32 if query.dtype == torch.float32 else _MOST_QUERIES
    block_m = queries or max(16, min(most, triton.next_power_of_2(group * length)))
    block_d = max(16, triton.next_power_of_2(dim))
    out = torch.empty(tokens, heads * dim, dtype=query.dtype, device=query.device)
    pieces = torch.empty(tokens * heads * num_pieces * dim if num_pieces > 1 else 1, device=query.device)
    logs = torch.empty(tokens * heads * num_pieces if num_pieces > 1 else 1, device=query.device)
    _attend[(rows * kv_heads, triton.cdiv(group * length, block_m), num_pieces)](
        query,
        keys,
        values,
        slots,
        starts,
        out,
        pieces,
        logs,
        length,
        num_pieces,
        piece,
        group=group,
        kv_heads=kv_heads,
        capacity=capacity,
        dim=dim,
        window=window or 0,
        scale=scale * _LOG2_E,
        is_whole=num_pieces == 1,
        block_m=block_m,
        block_n=_BLOCK,
        block_d=block_d,
        num_warps=4,
        num_stages=2,
    )
    if num_pieces > 1:
        _join[(tokens * heads,)](
            pieces,
            logs,
            out,
            num_pieces,
            dim=dim,
            block_p=_JOINED,
            block_d=block_d,
            num_warps=1,
        )
    return out
