"""What a head with a tail tells, for tests of those who show it."""

from __future__ import annotations

from relay.tail_figures import TailFigures
from tasks.figures import HeadFigures

GIB = 1 << 30
TOLD = TailFigures(20, 60, 1.5, 12.5, GIB, 16 * GIB)
FIGURES = HeadFigures(
    drafter="ngram",
    lanes=2,
    max_lanes=8,
    running=3,
    waiting=1,
    tokens_per_s=12.5,
    acceptance=0.5,
    tokens_per_round=2.5,
    rounds_total=10,
    row_rounds_total=20,
    tokens_total=60,
    round_tokens_total=50,
    prompt_tokens_total=40,
    drafted_total=80,
    accepted_total=40,
    draft_s_total=0.1,
    head_s_total=0.2,
    link_s_total=0.8,
    tail_s_total=0.3,
    rtt_ms=86.0,
    mbit_per_s_up=64.0,
    bytes_up_total=9000,
    bytes_down_total=900,
    gpu_used_bytes=GIB,
    gpu_total_bytes=16 * GIB,
    tail_id="gpu-b-01234567",
    tail=TOLD,
)  # type: ignore[arg-type]
