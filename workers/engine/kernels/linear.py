"""Linear layers of few tokens, and what stands between the linear layers of a decoder.

A decoding step is bound by reading weights. A product of few tokens is cut along its inputs, too, so that a narrow one
keeps the whole chip reading; its parts are summed by the kernel that comes next and adds the residual anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs."""

    block_m: int
    block_n: int
    block_k: int
    #: parts of the inputs, each a result of its own
    parts: int = 1
    warps: int = 4
    stages: int = 4


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x_at,
    weight_at,
    bias_at,
    out_at,
    tokens,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    part_inputs: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    part = tl.program_id(2)
    row = m.to(tl.int64)[:, None] * inputs
    weight_row = n.to(tl.int64)[:, None] * inputs
    is_token = m[:, None] < tokens
    is_output = n[:, None] < outputs
    acc = tl.zeros((block_m, block_n), tl.float32)
    acc_up = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, part_inputs, block_k):
        k = part * part_inputs + start + tl.arange(0, block_k)
        is_input = (k[None, :] < inputs) & (start + tl.arange(0, block_k)[None, :] < part_inputs)
        x = tl.load(x_at + row + k[None, :], mask=is_token & is_input, other=0.0)
        weight = tl.load(weight_at + weight_row + k[None, :], mask=is_output & is_input, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if is_gated:
            up_at = weight_at + tl.full((), outputs, tl.int64) * inputs
            up = tl.load(up_at + weight_row + k[None, :], mask=is_output & is_input, other=0.0)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")
    if has_bias:
        acc += tl.load(bias_at + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if is_gated:
        acc = acc * tl.sigmoid(acc) * acc_up
    place = (part * tokens + m).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out_at + place, acc.to(out_at.dtype.element_ty), mask=is_token & (n[None, :] < outputs))


def linear(x: Tensor, weight: Tensor, tile: Tile, *, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """`x @ weight.T + bias`, accumulated in float32. A token's bits depend on the tile, not on the other tokens.

    Args:
        x: [tokens, inputs], contiguous.
        weight: [outputs, inputs], contiguous; gated: [2 · outputs, inputs], the gate's rows first.
        tile: how to cut it; with several parts neither `bias` nor `gated`.
        bias: [outputs].
        gated: silu(gate) · up.

    Returns:
        [tokens, outputs] in the dtype of `x`; with several parts float32 [parts, tokens, outputs], to be summed.
    """
    tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if tile.parts == 1:
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(tile.parts, tokens, outputs, dtype=torch.float32, device=x.device)
    part_inputs = triton.cdiv(triton.cdiv(inputs, tile.parts), tile.block_k) * tile.block_k
    grid = (triton.cdiv(outputs, tile.block_n), triton.cdiv(tokens, tile.block_m), tile.parts)
    _linear[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        tokens,
        outputs=outputs,
        inputs=inputs,
        part_inputs=part_inputs,
        has_bias=bias is not None,
        is_gated=gated,
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=tile.block_k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _add_rms_norm(
    x_at,
    delta_at,
    gain_at,
    sum_at,
    out_at,
    tokens,
    inputs: tl.constexpr,
    eps: tl.constexpr,
    parts: tl.constexpr,
    has_norm: tl.constexpr,
    block: tl.constexpr,
):
    k = tl.arange(0, block)
    token = tl.program_id(0).to(tl.int64)
    place = token * inputs + k
    is_input = k < inputs
    x = tl.load(x_at + place, mask=is_input, other=0.0).to(tl.float32)
    if parts > 0:
        delta = tl.load(delta_at + place, mask=is_input, other=0.0).to(tl.float32)
        for part in tl.static_range(1, parts):
            delta += tl.load(delta_at + part * tokens * inputs + place, mask=is_input, other=0.0).to(tl.float32)
        x = (x + delta.to(sum_at.dtype.element_ty).to(tl.float32)).to(sum_at.dtype.element_ty).to(tl.float32)
        tl.store(sum_at + place, x.to(sum_at.dtype.element_ty), mask=is_input)
    if has_norm:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / inputs + eps)
        gain = tl.load(gain_at + k, mask=is_input, other=0.0).to(tl.float32)
        tl.store(out_at + place, (x * gain).to(out_at.dtype.element_ty), mask=is_input)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The RMS norm of every row of `x` [tokens, inputs]."""
    out = torch.empty_like(x)
    _launch_norm(x, x, gain, x, out, eps=eps, parts=0)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`x + delta` and its RMS norm, both [tokens, inputs]; without a gain the sum in place of its norm.

    `delta` may have one dimension more, in front: parts that are summed in their order.
    """
    total = torch.empty_like(x)
    out = total if gain is None else torch.empty_like(x)
    _launch_norm(x, delta, gain, total, out, eps=eps, parts=delta.shape[0] if delta.dim() == 3 else 1)
    return total, out


def _launch_norm(
    x: Tensor, delta: Tensor, gain: Tensor | None, total: Tensor, out: Tensor, *, eps: float, parts: int
) -> None:
    _add_rms_norm[(x.shape[0],)](
        x,
        delta,
        x if gain is None else gain,
        total,
        out,
        x.shape[0],
        inputs=x.shape[1],
        eps=eps,
        parts=parts,
        has_norm=gain is not None,
        block=triton.next_power_of_2(x.shape[1]),
        num_warps=4 if x.shape[1] <= 2048 else 8,
    )


@triton.jit
def _silu_mul(x_at, out_at, outputs: tl.constexpr, block: tl.constexpr):
    n = tl.program_id(1) * block + tl.arange(0, block)
    token = tl.program_id(0).to(tl.int64)
    gate = tl.load(x_at + token * 2 * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    up = tl.load(x_at + token * 2 * outputs + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_at + token * outputs + n, value.to(out_at.dtype.element_ty), mask=n < outputs)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of [tokens, 2 · outputs], the gate's columns first."""
    tokens, outputs = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, outputs, dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, triton.cdiv(outputs, 1024))
    _silu_mul[grid](gate_up, out, outputs=outputs, block=1024)
    return out
