"""How products of few tokens are cut: always so that a program's share fits the GPU's shared memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.interpreted import needs_triton

pytestmark = needs_triton

#: [outputs, inputs] of the products of small and large models
WEIGHTS = [(1152, 896), (896, 4864), (4608, 3584), (3584, 18944), (5120, 13824), (49152, 576)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_what_a_program_loads_ahead_fits_the_shared_memory(dtype: torch.dtype, shared: int) -> None:
    from workers.engine.kernels.tiles import Tiles

    tiles = Tiles(dtype.itemsize, shared)
    for tokens, (outputs, inputs) in itertools.product((1, 9, 16) if dtype.itemsize == 4 else (1, 9, 17, 64), WEIGHTS):
        gated = tiles.gated(tokens, 2 * outputs, inputs)
        assert gated is not None
        cut = [(gated, 2), (tiles.exact(), 2), (tiles.plain(tokens, outputs, inputs, may_part=True), 1)]
        for tile, weights in cut:
            assert tile is not None
            assert (tile.block_m + weights * tile.block_n) * tile.block_k * tile.stages * dtype.itemsize <= shared
            assert min(tile.block_m, tile.block_n, tile.block_k) >= 16


def test_large_products_are_the_librarys_and_one_that_nobody_sums_is_whole() -> None:
    from workers.engine.kernels.tiles import Tiles

    tiles = Tiles(2, 227 << 10)

    assert tiles.plain(65, 896, 896, may_part=True) is None
    assert tiles.gated(65, 9728, 896) is None
    without_tensor_cores = Tiles(4, 227 << 10)
    assert without_tensor_cores.plain(17, 896, 896, may_part=True) is None
    assert without_tensor_cores.gated(17, 9728, 896) is None
    parted, whole = (tiles.plain(1, 896, 4864, may_part=may_part) for may_part in (True, False))
    assert parted is not None
    assert parted.parts > 1
    assert whole is not None
    assert whole.parts == 1
