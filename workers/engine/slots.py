"""How many slots fit a machine beside a half of a model. No I/O."""

from __future__ import annotations

from workers.errors import OutOfMemory

#: most slots that are chosen automatically
MAX_SLOTS = 256


def slots_that_fit(free_bytes: int, slot_bytes: int, *, most: int = MAX_SLOTS) -> int:
    """Slots that `free_bytes` hold, the scratch slot not counted.

    Args:
        free_bytes: what weights and activations leave; may be negative.
        slot_bytes: one slot of the cache, the drafter's included.
        most: at most so many.

    Raises:
        OutOfMemory: there is no room for a single one.
    """
    fitting = free_bytes // slot_bytes - 1
    if fitting < 1:
        raise OutOfMemory(
            f"no room for a single slot: 2 x {slot_bytes / 1e6:.1f} MB are needed beside the weights (one slot is "
            f"scratch), and {max(0, free_bytes) / 1e6:.1f} MB are free; --quantization nf4 or a smaller --max-length "
            "needs less, as does another --split"
        )
    return min(most, fitting)
