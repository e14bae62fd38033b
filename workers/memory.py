"""Running out of memory, told apart from every other error, with the numbers that torch tells."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workers.errors import OutOfMemory

#: how torch says it where it has no type of its own for it: allocators of the host, libraries on the device
_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
#: characters of torch's own text that are worth showing
_LONGEST_TEXT = 300
#: what the kernel says of the host's memory, and a container of its own limit and of what it has used of it
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


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
    """Give back what is kept of the device's memory for later: what others hold may then fit beside it.

    On a GPU torch keeps it, on the host the C library: it leaves holes between small tensors where large ones were.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "cpu" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # glibc's; other C libraries have none


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on the device or, for the CPU, on the host; None where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    if device.type != "cpu" or not _MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = (_cgroup_bytes(name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else max(0, min(available, limit - used))


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes in use of the GPU's memory, by this process and others, and all of it; 0 and 0 where there is no GPU."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


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
