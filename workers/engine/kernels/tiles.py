"""Which products of few tokens our own kernel makes, and how it cuts them; the library makes all others.

Measured on an H200 (docs/performance.md); any tile gives the right result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from workers.engine.kernels.linear import Tile

#: most tokens of a product that is ours
MOST_TOKENS = 64
#: programs that keep an H200's 132 multiprocessors reading
_ENOUGH_PROGRAMS = 200
#: KiB of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, table of technical
#: specifications); of others at least so much
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_LEAST_SHARED_KIB = 99


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles for weights of one dtype on one device."""

    #: bytes of an element
    size: int
    #: bytes of shared memory of a program
    shared: int

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Tiles:
        """For this device."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        return cls(dtype.itemsize, _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10)

    def plain(self, tokens: int, outputs: int, inputs: int, *, may_part: bool) -> Tile | None:
        """The tile for `x` [tokens, inputs] times a weight [outputs, inputs]; None where the library is faster."""
        if tokens > self._most_tokens or (outputs > 4096 and not may_part):
            return None
        block_n = 16 if outputs <= 2048 else 32
        parts = 1
        while may_part and parts < 8 and outputs // block_n * parts < _ENOUGH_PROGRAMS and inputs // parts >= 512:
            parts *= 2
        tile = Tile(_block_m(tokens), block_n, 256 if inputs > 8192 and tokens <= 16 else 128, parts)
        return self._fitted(tile, tile.block_n)

    def gated(self, tokens: int, rows: int, inputs: int) -> Tile | None:
        """The tile for a gated product with a weight [rows, inputs]; None where the library is faster."""
        if tokens > self._most_tokens:
            return None
        tile = Tile(_block_m(tokens), 64 if rows <= 16384 else 32, 128, stages=4 if tokens <= 32 else 3)
        return self._fitted(tile, 2 * tile.block_n)

    @property
    def _most_tokens(self) -> int:
        # Without tensor cores, large tiles take the compiler many seconds each.
        return MOST_TOKENS if self.size < 4 else min(MOST_TOKENS, 16)

    def exact(self) -> Tile:
        """The one tile where a token's bits must not depend on how many come together."""
        return self._fitted(_EXACT, 2 * _EXACT.block_n)

    def _fitted(self, tile: Tile, rows: int) -> Tile:
        """The tile with as few stages, then as few inputs at once, as it takes to fit the shared memory."""
        while (tile.block_m + rows) * tile.block_k * tile.stages * self.size > self.shared:
            if tile.stages > 2:
                tile = replace(tile, stages=tile.stages - 1)
            else:
                tile = replace(tile, block_k=tile.block_k // 2)
        return tile


_EXACT = Tile(block_m=16, block_n=32, block_k=64, stages=3)


def _block_m(tokens: int) -> int:
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64
