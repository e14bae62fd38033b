"""What a tail tells of its process, beside its verdicts: the tail talks to nobody but its head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TailFigures:
    """Totals since the tail's process started; they go on over epochs and over heads."""

    #: rows answered, prefill chunks included
    rows: int
    #: tokens committed
    tokens: int
    #: seconds worked on frames
    compute_s: float
    #: seconds since the process was ready
    uptime_s: float
    #: bytes of the GPU's memory in use, by whomever, and all of it; 0 and 0 without a GPU
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
