"""Torch tensors to and from the relay's raw tensor bytes, and packed rows to and from padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from relay.messages import Tensor

#: torch dtype of every dtype name in `relay.messages.DTYPE_BYTES`
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
#: the largest magnitude that "int8" uses: symmetric around zero, -128 stays unused
LEVELS = 127


@dataclass(frozen=True, slots=True)
class Handed(Tensor):
    """Hidden states for a tail in this process: they stay on the device, `data` is empty, and no codec takes them."""

    #: [tokens, hidden], as precise as the wire dtype `dtype`
    values: torch.Tensor = field(kw_only=True, compare=False, repr=False)


def hand_over(values: torch.Tensor, dtype: str) -> Handed:
    """What `from_wire` makes of `to_wire(values, dtype)`, without a copy to the CPU and back.

    A copy on the device all the same: a half may use its buffers again before the tail has read them.
    """
    rounded = dequantise(*quantise(values)) if dtype == "int8" else values.to(TORCH_DTYPES[dtype], copy=True)
    return Handed(dtype, tuple(values.shape), b"", values=rounded)


def to_wire(values: torch.Tensor, dtype: str) -> Tensor:
    """[tokens, hidden] in the given wire dtype; copies to the CPU. A token's bytes depend on its own values only."""
    if dtype != "int8":
        return Tensor(dtype, tuple(values.shape), _bytes_of(values.to(TORCH_DTYPES[dtype])))
    levels, scales = quantise(values)
    return Tensor(dtype, tuple(values.shape), _bytes_of(levels), _bytes_of(scales))


def from_wire(tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[tokens, hidden] on the device in the compute dtype. Shape and size were checked by the codec."""
    if isinstance(tensor, Handed):
        return tensor.values.to(device=device, dtype=dtype)
    values = _on(device, tensor.data, TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype != "int8":
        return values.to(dtype)
    return dequantise(values, _on(device, tensor.scales, torch.float32)).to(dtype)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as its multiples of one step: int8 [rows, hidden] and the steps, float32 [rows].

    Symmetric: a row's step is its largest magnitude / `LEVELS`, so it errs by half a step at most. The arithmetic is
    float32 and elementwise beside the maximum, which is exact in any order: rows cannot influence each other. A row
    that holds a value that is not finite gets the step NaN, so that all of it is NaN again behind the wire.
    """
    rows = values.detach().float()
    steps = rows.abs().amax(dim=-1) / LEVELS
    finite = steps.isfinite()
    # a row of zeros, or of values so small that the step underflows, becomes zeros
    divisors = torch.where(finite & (steps > 0), steps, 1.0)
    levels = (rows / divisors[:, None]).round().clamp(-LEVELS, LEVELS)
    return torch.where(finite[:, None], levels, 0.0).to(torch.int8), torch.where(finite, steps, torch.nan)


def dequantise(levels: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The float32 values that `quantise` made int8 of, each off by half its row's step at most."""
    return levels.float() * steps[:, None]


def _bytes_of(values: torch.Tensor) -> memoryview:
    source = values.detach().contiguous()
    host = source
    if source.is_cuda:  # to memory that the device writes itself, and waiting for this copy only
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source, non_blocking=True)
        torch.cuda.current_stream(source.device).synchronize()
    return _memory(host)


def _on(device: torch.device, data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
    view = memoryview(data).cast("B")
    host = torch.empty(view.nbytes // dtype.itemsize, dtype=dtype, pin_memory=device.type == "cuda")
    _memory(host)[:] = view
    return host.to(device, non_blocking=True)


def _memory(host: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU; they live as long as the view."""
    return host.view(torch.uint8).numpy().data.cast("B")


def pad_rows(packed: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[sum(counts), …] → [rows, max(counts), …], zeros behind each row's own part."""
    if min(counts) == max(counts):
        return packed.reshape(len(counts), counts[0], *packed.shape[1:])
    parts = torch.split(packed, list(counts))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def pack_rows(padded: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[rows, query, …] → [sum(counts), …]: each row's first `counts[row]` entries."""
    if min(counts) == padded.shape[1]:
        return padded.flatten(0, 1)
    places = torch.tensor(packed_places(counts, padded.shape[1]), device=padded.device)
    return padded.flatten(0, 1).index_select(0, places)


def packed_places(counts: Sequence[int], query: int) -> list[int]:
    """Where packed entries stand among padded rows of `query` entries."""
    return [row * query + place for row, count in enumerate(counts) for place in range(count)]


def padded_places(counts: Sequence[int], query: int) -> list[int]:
    """Where the entries of padded rows stand among packed ones; behind a row's own, its first again.

    Never another row's: what pads a row goes into its cache, and must be as sound as the row itself.
    """
    places, begin = [], 0
    for count in counts:
        places += [*range(begin, begin + count), *[begin] * (query - count)]
        begin += count
    return places
