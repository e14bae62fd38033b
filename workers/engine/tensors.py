"""Torch tensors to and from the relay's raw tensor bytes, and packed rows to and from padded ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relay.messages import Tensor

#: torch dtype of every dtype name in `relay.messages.DTYPE_BYTES`
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}


def to_wire(values: torch.Tensor, dtype: str) -> Tensor:
    """The tensor's bytes in the given wire dtype; copies to the CPU."""
    host = values.detach().to("cpu", TORCH_DTYPES[dtype]).contiguous()
    return Tensor(dtype, tuple(host.shape), host.view(torch.uint8).numpy().data.cast("B"))


def from_wire(tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor on the device in the compute dtype. Shape and size were checked by the codec."""
    values = torch.frombuffer(bytearray(tensor.data), dtype=TORCH_DTYPES[tensor.dtype])
    return values.reshape(tensor.shape).to(device, dtype)


def pad_rows(packed: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[sum(counts), …] → [rows, max(counts), …], zeros behind each row's own part."""
    parts = torch.split(packed, list(counts))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def pack_rows(padded: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[rows, query, …] → [sum(counts), …]: each row's first `counts[row]` entries."""
    lengths = torch.as_tensor(counts, device=padded.device)
    kept = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded[kept]
