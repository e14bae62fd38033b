"""Running out of memory, told apart from every other error, with the numbers that torch tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.errors import OutOfMemory

#: how torch says it where it has no type of its own for it: allocators of the host, libraries on the device
_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
#: characters of torch's own text that are worth showing
_LONGEST_TEXT = 300


@contextmanager
def memory_watched(device: torch.device) -> Iterator[None]:
    """Runs computations on the device; raises OutOfMemory where it, or the host, has no room for them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_numbers(error, device)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that there was no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)


def free_unused(device: torch.device) -> None:
    """Give back what torch keeps of the device's memory for later: what others hold may then fit beside it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _numbers(error: BaseException, device: torch.device) -> str:
    """What was asked for, and what was free, as far as it is known."""
    lines = str(error).strip().splitlines() or ["the host has no memory left"]
    text = lines[0]
    # torch's allocator of the host writes its place in the source in front
    allocator = text.find("DefaultCPUAllocator")
    text = text[max(0, allocator) :][:_LONGEST_TEXT]
    if device.type == "cuda" and "free" not in text:
        free, total = torch.cuda.mem_get_info(device)
        text += f"; {free >> 20} of {total >> 20} MiB are free on {device}"
    return text
