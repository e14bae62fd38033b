"""How long work on a device takes: medians of many runs, by the host's clock, the device waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

#: runs before the measured ones: kernels are loaded, graphs captured
WARM_UP = 5
#: bytes of the tensor that is copied to learn the bandwidth
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time goes into a figure."""

    #: most runs
    runs: int
    #: no further run begins after so many seconds
    longest_s: float


THOROUGH = Effort(runs=60, longest_s=5.0)
QUICK = Effort(runs=20, longest_s=2.0)
REHEARSAL = Effort(runs=3, longest_s=0.3)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """The median time of one call, in milliseconds, from an idle device to an idle device."""
    for _ in range(min(WARM_UP, effort.runs)):
        work()
    times: list[float] = []
    deadline = time.perf_counter() + effort.longest_s
    while len(times) < effort.runs and (not times or time.perf_counter() < deadline):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - began))
    return median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy on the device moves, bytes read and bytes written counted."""
    size = COPIED_BYTES[device.type]
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), device, Effort(runs=20, longest_s=3.0))
    return 2 * size / (ms / 1000)
