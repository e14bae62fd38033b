"""A frame's tensor: its description in the header, its bytes in the body. No torch."""

from __future__ import annotations

from typing import Any

from relay.errors import FrameInvalid
from relay.fields import Fields
from relay.messages import DTYPE_BYTES, SCALE_BYTES, Tensor
from relay.shrink import restore


def raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes. Raises `FrameInvalid` for data that is not C-contiguous."""
    try:
        return memoryview(tensor.data).cast("B")
    except (TypeError, ValueError) as error:
        raise FrameInvalid(f"tensor data must be C-contiguous bytes: {error}") from error


def describe(tensor: Tensor, num_deflated: int = 0) -> list[Any]:
    """What the header says of the tensor; `num_deflated` as in `relay.shrink`, 0 for a body of raw bytes."""
    return [tensor.dtype, list(tensor.shape), bytes(tensor.scales), num_deflated]


def read_tensor(description: object, body: memoryview, max_bytes: int) -> Tensor:
    """A matrix: every tensor on the wire is [tokens, hidden], of at most `max_bytes`. Raises `FrameInvalid`."""
    fields = Fields(description, "Tensor", 4)
    dtype = fields.text("dtype")
    if dtype not in DTYPE_BYTES:
        raise FrameInvalid(f"Tensor.dtype: {dtype[:40]!r} is none of {', '.join(DTYPE_BYTES)}")
    shape = Fields(fields.array("shape", 2), "Tensor.shape", 2)
    rows, columns = shape.integer("rows", 1), shape.integer("columns", 1)
    scales = fields.binary("scales", SCALE_BYTES * rows if dtype == "int8" else 0)
    width, num_deflated = DTYPE_BYTES[dtype], fields.integer("deflated")
    num_bytes = width * rows * columns
    if num_bytes > max_bytes:
        raise FrameInvalid(f"Tensor: {dtype} [{rows}, {columns}] exceeds the frame limit of {max_bytes} bytes")
    if num_deflated:
        body = restore(num_deflated, body, width, rows * columns)
    elif num_bytes != body.nbytes:
        raise FrameInvalid(f"Tensor: {dtype} [{rows}, {columns}] does not fit {body.nbytes} bytes")
    return Tensor(dtype, (rows, columns), body, scales)
