"""The noise of the shared choice on a GPU: `workers.engine.noise`, bit for bit up to its logarithms."""

from __future__ import annotations

import triton
import triton.language as tl

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX64_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX64_B = tl.constexpr(0x94D049BB133111EB)
_MIX32_A = tl.constexpr(0x7FEB352D)
_MIX32_B = tl.constexpr(0x846CA68B)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix64(value):
    value = (value ^ (value >> 30)) * _MIX64_A
    value = (value ^ (value >> 27)) * _MIX64_B
    return value ^ (value >> 31)


@triton.jit
def _mix32(value):
    value = (value ^ (value >> 16)) * _MIX32_A
    value = (value ^ (value >> 15)) * _MIX32_B
    return value ^ (value >> 16)


@triton.jit
def gumbel(seed, position, ids):
    """`workers.engine.noise.gumbel`: the same 32 bits, the logarithms within a few units in the last place."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    key = _mix64(_mix64(seed.to(tl.uint64, bitcast=True) + gamma) + position.to(tl.uint64, bitcast=True) * gamma)
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(ids.to(tl.uint32) ^ low) + high)
    value = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), _BELOW_ONE)
    # log1p(-value): a series where the hardware's logarithm near 1 has lost its digits
    series = value * (1.0 / 8)
    series = value * (1.0 / 7 + series)
    series = value * (1.0 / 6 + series)
    series = value * (1.0 / 5 + series)
    series = value * (1.0 / 4 + series)
    series = value * (1.0 / 3 + series)
    series = value * (1.0 / 2 + series)
    series = value * (1.0 + series)
    exponential = tl.where(value < 0.0625, series, -tl.log(1.0 - value))
    return -tl.log(exponential)
