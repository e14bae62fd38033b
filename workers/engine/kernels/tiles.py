"""Which products of few tokens our own kernel makes, and how it cuts them; the library makes all others.

Measured on an H200 (docs/performance.md); any tile gives the right result.
"""

from __future__ import annotations

from workers.engine.kernels.linear import Tile

#: most tokens of a product that is ours
MOST_TOKENS = 64
#: programs that keep an H200's 132 multiprocessors reading
_ENOUGH_PROGRAMS = 200


def tile_for(tokens: int, outputs: int, inputs: int, *, may_part: bool) -> Tile | None:
    """The tile for `x` [tokens, inputs] times a weight [outputs, inputs]; None where the library is faster."""
    if tokens > MOST_TOKENS or (outputs > 4096 and not may_part):
        return None
    block_n = 16 if outputs <= 2048 else 32
    parts = 1
    while may_part and parts < 8 and outputs // block_n * parts < _ENOUGH_PROGRAMS and inputs // parts >= 512:
        parts *= 2
    return Tile(_block_m(tokens), block_n, 256 if inputs > 8192 and tokens <= 16 else 128, parts)


def gated_tile_for(tokens: int, rows: int, inputs: int) -> Tile | None:
    """The tile for a gated product with a weight [rows, inputs]; None where the library is faster."""
    if tokens > MOST_TOKENS:
        return None
    return Tile(_block_m(tokens), 64 if rows <= 16384 else 32, 128, stages=4 if tokens <= 32 else 3)


def _block_m(tokens: int) -> int:
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64
