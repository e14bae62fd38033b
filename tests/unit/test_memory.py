"""Being out of memory is told apart from other errors, with the numbers."""

from __future__ import annotations

import pytest
import torch

from workers.errors import OutOfMemory
from workers.memory import free_unused, memory_watched

CPU = torch.device("cpu")


def test_a_tensor_that_no_host_can_hold_is_reported_with_its_size() -> None:
    with pytest.raises(OutOfMemory, match=str(1 << 60)), memory_watched(CPU):
        torch.empty(1 << 60, dtype=torch.uint8)
    free_unused(CPU)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. 1.00 GiB is free.\nsee the manual"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc.cpp:1] . DefaultCPUAllocator: not enough memory: you tried to allocate 9"),
    ],
)
def test_every_way_of_saying_it_is_understood_and_told_in_one_line(error: BaseException) -> None:
    with pytest.raises(OutOfMemory) as raised, memory_watched(CPU):
        raise error
    text = str(raised.value)
    assert text
    assert "\n" not in text
    assert "enforce fail" not in text


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("x")])
def test_any_other_error_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory_watched(CPU):
        raise error
    assert raised.value is error
