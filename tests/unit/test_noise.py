"""The noise is one fixed function of (seed, position, token id), and looks like noise in every direction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from workers.engine.noise import gumbel, token_bits

_64 = (1 << 64) - 1
_32 = (1 << 32) - 1

#: a fair source fails a check this often; the inputs are fixed, so the checks do not flake
ALPHA = 1e-4

#: bits of (seed, position, token id), from `reference_bits`, written down so that the function never changes
GOLDEN = {
    (0, 0, 0): 3543252776,
    (0, 0, 1): 2597581238,
    (0, 1, 0): 535004646,
    (1, 0, 0): 2376233319,
    (42, 17, 49151): 3910522739,
    (-1, 1023, 151935): 1487233071,
    (2**63 - 1, 131071, 262143): 265687898,
    (-(2**63), 5, 7): 692925245,
}


def reference_bits(seed: int, position: int, token: int) -> int:
    """`token_bits` in plain Python integers."""

    def mix64(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64
        return z ^ (z >> 31)

    def mix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _32
        return x ^ (x >> 16)

    gamma = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + gamma) & _64) + position * gamma) & _64)
    return mix32((mix32(token ^ (key & _32)) + (key >> 32)) & _32)


def reference_gumbel(bits: int) -> float:
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def bits_of(seeds: object, positions: object, ids: object) -> torch.Tensor:
    """Bits as unsigned values in int64 [rows, tokens]."""
    as_rows = (torch.as_tensor(values, dtype=torch.int64).reshape(-1) for values in (seeds, positions))
    return token_bits(*as_rows, torch.as_tensor(ids, dtype=torch.int32)).to(torch.int64) & _32


def is_uniform(values: np.ndarray, bins: int) -> bool:
    """Chi-square of 32-bit values over equal bins."""
    counts = np.bincount((values.astype(np.uint64) * np.uint64(bins)) >> np.uint64(32), minlength=bins)
    return bool(stats.chisquare(counts).pvalue > ALPHA)


def are_independent(left: np.ndarray, right: np.ndarray) -> bool:
    """Chi-square of pairs of 32-bit values over a 16 x 16 grid, by their high and by their low bits."""
    for shift in (28, 0):
        cell = ((left >> shift) & 15) * 16 + ((right >> shift) & 15)
        if stats.chisquare(np.bincount(cell, minlength=256)).pvalue <= ALPHA:
            return False
    return True


@pytest.mark.parametrize(("place", "bits"), GOLDEN.items())
def test_the_bits_are_those_written_down(place: tuple[int, int, int], bits: int) -> None:
    seed, position, token = place
    assert reference_bits(seed, position, token) == bits
    assert bits_of([seed], [position], [token]).item() == bits


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    token=st.integers(0, 2**20),
)
def test_the_bits_are_those_of_the_reference_for_any_input(seed: int, position: int, token: int) -> None:
    assert bits_of([seed], [position], [token]).item() == reference_bits(seed, position, token)


def test_ids_may_be_given_row_by_row() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([5, 6])
    ids = torch.tensor([[0, 9, 2], [8, 1, 1]], dtype=torch.int32)
    expected = [[reference_bits(3 + r, 5 + r, t) for t in row] for r, row in enumerate(ids.tolist())]
    assert bits_of(seeds, positions, ids).tolist() == expected


def test_the_noise_is_the_gumbel_transform_of_the_bits() -> None:
    noise = gumbel(torch.tensor([7, 8]), torch.tensor([1, 2]), 1000)
    for row, (seed, position) in enumerate([(7, 1), (8, 2)]):
        expected = [reference_gumbel(reference_bits(seed, position, token)) for token in range(1000)]
        np.testing.assert_allclose(noise[row].numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bits", "tolerance"), [(0, 1e-6), (1, 1e-6), (2**16 + 1, 1e-6), (2**32 - 1, 3.0)])
def test_the_winning_end_is_precise_and_no_end_is_infinite(bits: int, tolerance: float) -> None:
    from workers.engine.noise import _to_gumbel

    signed = bits - 2**32 if bits >= 2**31 else bits
    value = _to_gumbel(torch.tensor([signed], dtype=torch.int32)).item()
    assert math.isfinite(value)
    assert value == pytest.approx(reference_gumbel(bits), abs=tolerance, rel=tolerance)


def test_the_transform_falls_with_the_bits_everywhere() -> None:
    from workers.engine.noise import _to_gumbel

    bits = (
        torch.cat([torch.arange(0, 1 << 12), torch.linspace(0, _32, 1 << 16, dtype=torch.float64).long()]).sort().values
    )
    signed = torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32)
    assert (_to_gumbel(signed).diff() <= 0).all()


@pytest.mark.parametrize("num_tokens", [1, 7, 257, 49_152])
def test_a_row_has_the_same_noise_alone_and_among_others(num_tokens: int) -> None:
    seeds, positions = torch.arange(5) - 2, torch.arange(5) * 100
    together = gumbel(seeds, positions, num_tokens)
    for row in range(5):
        assert torch.equal(gumbel(seeds[row : row + 1], positions[row : row + 1], num_tokens)[0], together[row])


def test_a_longer_vocabulary_leaves_the_noise_of_the_shorter_as_it_was() -> None:
    seeds, positions = torch.tensor([11]), torch.tensor([12])
    torch.testing.assert_close(gumbel(seeds, positions, 1003)[:, :1000], gumbel(seeds, positions, 1000), rtol=0, atol=0)


def test_the_noise_has_the_moments_of_a_standard_gumbel() -> None:
    noise = gumbel(torch.arange(20), torch.arange(20), 50_000).double()
    assert noise.mean().item() == pytest.approx(0.577216, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.015)
    assert stats.kstest(noise.flatten()[::10].numpy(), "gumbel_r").pvalue > ALPHA


@pytest.mark.parametrize("along", ["seed", "position", "token"])
def test_the_bits_are_uniform_along_every_axis(along: str) -> None:
    span = torch.arange(200_000)
    fixed = torch.zeros_like(span)
    bits = {
        "seed": lambda: bits_of(span, fixed, [3]),
        "position": lambda: bits_of(fixed, span, [3]),
        "token": lambda: bits_of([0], [0], span),
    }[along]()
    assert is_uniform(bits.flatten().numpy(), 1024)


@pytest.mark.parametrize("step", [1, 2, 64, 1 << 16, 1 << 32, 1 << 62])
def test_neighbouring_seeds_are_independent(step: int) -> None:
    seeds = torch.arange(100_000) * 3
    left, right = (bits_of(s, torch.zeros_like(s), [5]).flatten().numpy() for s in (seeds, seeds + step))
    assert are_independent(left, right)


@pytest.mark.parametrize("step", [1, 2, 64, 1 << 16])
def test_neighbouring_positions_are_independent(step: int) -> None:
    positions = torch.arange(100_000)
    left, right = (bits_of(torch.full_like(p, 9), p, [5]).flatten().numpy() for p in (positions, positions + step))
    assert are_independent(left, right)


@pytest.mark.parametrize("step", [1, 2, 64, 1 << 12])
def test_neighbouring_tokens_are_independent(step: int) -> None:
    bits = bits_of([1], [1], torch.arange(100_000 + step)).flatten().numpy()
    assert are_independent(bits[:100_000], bits[step:])


def test_seed_and_position_do_not_trade_against_each_other() -> None:
    seeds = torch.arange(100_000)
    left = bits_of(seeds, torch.full_like(seeds, 10), [0]).flatten().numpy()
    right = bits_of(seeds + 1, torch.full_like(seeds, 9), [0]).flatten().numpy()
    assert are_independent(left, right)


def test_every_input_bit_flips_half_of_the_output_bits() -> None:
    seeds = torch.arange(4000) * 7919
    base = bits_of(seeds, seeds % 1000, [77])
    flips = [bits_of(seeds ^ (1 << bit if bit < 63 else -(2**63)), seeds % 1000, [77]) for bit in range(64)]
    flips += [bits_of(seeds, (seeds % 1000) ^ (1 << bit), [77]) for bit in range(20)]
    flips += [bits_of(seeds, seeds % 1000, [77 ^ (1 << bit)]) for bit in range(18)]
    changed = (base ^ torch.stack(flips)).numpy()
    for bit in range(32):
        rate = ((changed >> bit) & 1).mean(axis=1)
        assert np.abs(rate - 0.5).max() < 0.045


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_bits_as_the_cpu() -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), dtype=torch.int64)
    positions = torch.randint(0, 1 << 20, (64,), dtype=torch.int64)
    ids = torch.arange(151_936, dtype=torch.int32)
    on_cuda = token_bits(seeds.cuda(), positions.cuda(), ids.cuda()).cpu()
    assert torch.equal(on_cuda, token_bits(seeds, positions, ids))
