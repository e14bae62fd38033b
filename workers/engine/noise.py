"""Counter-based Gumbel noise: g(seed, absolute position, token id), the same whoever computes it.

The hash is integer arithmetic only, so its 32 bits are equal on every device; only the two logarithms may
differ in their last place. There is no state: drafter and target, CPU and GPU, today and after a crash draw
the same noise.

Key per (seed, position): the SplitMix64 finaliser (Steele, Lea, Flood 2014), once over the seed and once more
with the position. Bits per token: two rounds of the 32-bit mixer `lowbias32` (Wellons 2018), each keyed with
one half of that key.

Everything here works on tensors of fixed shape without reading a value back, so it may stand inside a CUDA
graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MIX32 = (0x7FEB352D, 0x846CA68B)
_TWO_32 = 4294967296.0

#: values that a CPU computes at once: some twenty passes run over them, so they should stay in its cache
_BLOCK = 1 << 16

#: the largest float32 below 1: keeps the losing end of the noise finite (g >= -2.82)
_BELOW_ONE = 1.0 - 2.0**-24


def gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise for token ids 0..num_tokens-1 of every row.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows], absolute position of the token that is chosen with this noise.
        num_tokens: size of the vocabulary.

    Returns:
        float32 [rows, num_tokens], all finite. A row's values depend on its own seed and position only.
    """
    ids = torch.arange(num_tokens, dtype=torch.int32, device=seeds.device)
    if seeds.device.type != "cpu":
        return _to_gumbel(token_bits(seeds, positions, ids))
    at_once = max(1, _BLOCK // num_tokens)
    pairs = zip(torch.split(seeds, at_once), torch.split(positions, at_once), strict=True)
    return torch.cat([_to_gumbel(token_bits(*pair, ids)) for pair in pairs])


def token_bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The 32 random bits behind the noise, as int32.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows].
        ids: int32 [tokens], or [rows, tokens] with ids of each row's own.

    Returns:
        int32 [rows, tokens].
    """
    key = _mix64(_mix64(seeds + _signed(_GAMMA, 64)) + positions * _signed(_GAMMA, 64))
    low = _low_32(key).unsqueeze(-1)
    high = _low_32(key >> 32).unsqueeze(-1)
    bits = torch.bitwise_xor(ids, low)
    return _mix32_(_mix32_(bits).add_(high))


def _to_gumbel(bits: Tensor) -> Tensor:
    """-log(-log1p(-v)) with v = (bits + 0.5) / 2^32, bits taken as unsigned.

    The winning end is v near 0, where a float32 holds every one of the 2^32 values exactly.
    """
    value = bits.to(torch.float32)
    value = torch.where(value < 0, value + _TWO_32, value)
    value.add_(0.5).mul_(1 / _TWO_32).clamp_(max=_BELOW_ONE)
    return value.neg_().log1p_().neg_().log_().neg_()


def _mix64(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, a bijection."""
    value = (value ^ _shift_right(value, 30, 64)) * _signed(_MIX64[0], 64)
    value = (value ^ _shift_right(value, 27, 64)) * _signed(_MIX64[1], 64)
    return value ^ _shift_right(value, 31, 64)


def _mix32_(value: Tensor) -> Tensor:
    """`lowbias32` in place on int32, a bijection."""
    value.bitwise_xor_(_shift_right(value, 16, 32)).mul_(_signed(_MIX32[0], 32))
    value.bitwise_xor_(_shift_right(value, 15, 32)).mul_(_signed(_MIX32[1], 32))
    return value.bitwise_xor_(_shift_right(value, 16, 32))


def _shift_right(value: Tensor, count: int, width: int) -> Tensor:
    """Logical shift: torch shifts signed integers arithmetically, so the sign's copies are masked away."""
    return (value >> count).bitwise_and_((1 << (width - count)) - 1)


def _low_32(value: Tensor) -> Tensor:
    """The low half of an int64 as int32, bit for bit (C leaves the cast of a larger value undefined)."""
    low = value & 0xFFFFFFFF
    return torch.where(low > 0x7FFFFFFF, low - (1 << 32), low).to(torch.int32)


def _signed(value: int, width: int) -> int:
    """An unsigned constant as the signed integer with the same bits."""
    return value - (1 << width) if value >> (width - 1) else value
