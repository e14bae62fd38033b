"""Keys and values of all slots: two static tensors, written by position and never reallocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """The cache of one half: per layer and slot the keys and values of positions [0, capacity).

    Slot number `slots` is scratch, for rows that only pad a forward. The last `max_query` positions take the
    tokens that pad a row; nothing there is ever seen by a real token. A rewind needs no call: the next write at
    a smaller position overwrites what was there, and masks hide everything after a query's own position.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        slots: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeroed tensors; zeros, because even masked values must be finite."""
        shape = (num_layers, slots + 1, num_kv_heads, capacity, head_dim)
        self.slots = slots
        self.capacity = capacity
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Make the first `length` positions of `destination` equal to those of `source`."""
        for tensor in (self.keys, self.values):
            tensor[:, destination, :, :length] = tensor[:, source, :, :length]

    def zero_slot(self, slot: int) -> None:
        """Forget a slot that may hold non-finite values: those poison attention even behind a mask."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0


class RowsOfCache:
    """The rows of one forward as the cache object that a transformers model writes to and reads from."""

    is_compileable = False

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor, length: int) -> None:
        """`slots` [rows], `positions` [rows, query]; keys and values are read up to `length`."""
        self._cache = cache
        self._index = (slots[:, None], positions)
        self._slots = slots
        self._length = length
        self._span = _consecutive(slots)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, query, head_dim] and return [rows, kv_heads, length, head_dim] of each."""
        return (
            self._write_and_read(self._cache.keys[layer_idx], keys),
            self._write_and_read(self._cache.values[layer_idx], values),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that are read; models ask only when they are not told positions, which we always do."""
        return self._length

    def _write_and_read(self, layer: Tensor, new: Tensor) -> Tensor:
        layer.transpose(1, 2).index_put_(self._index, new.transpose(1, 2))
        filled = layer[:, :, : self._length]
        if self._span is not None:
            return filled[self._span]
        return filled.index_select(0, self._slots)


def _consecutive(slots: Tensor) -> slice | None:
    """The slots as a slice, which needs no copy, if they ascend by one."""
    if slots.device.type != "cpu":  # looking would wait for the device
        return None
    numbers = slots.tolist()
    first = int(numbers[0])
    if numbers != list(range(first, first + len(numbers))):
        return None
    return slice(first, first + len(numbers))
