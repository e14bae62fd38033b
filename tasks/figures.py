"""What a head tells of its work with its presence, its tail's figures included; `shardq top` and `/metrics` show it."""

from __future__ import annotations

from dataclasses import dataclass

from relay.tail_figures import TailFigures

#: bytes of a head's figures as JSON, at most
MAX_FIGURES_BYTES = 2048


@dataclass(frozen=True, slots=True)
class HeadFigures:
    """Totals count from the start of the head's process and never fall; the rest is of the last seconds.

    None stands where nothing was measured yet, or lately.
    """

    #: kind of the drafter
    drafter: str
    #: rounds kept in flight, and the most there may be
    lanes: int
    max_lanes: int
    #: texts in slots, and in line for one
    running: int
    waiting: int
    #: completion tokens per second
    tokens_per_s: float
    #: share of the drafted tokens that were accepted
    acceptance: float | None
    #: tokens committed by a row's round, the tail's own included
    tokens_per_round: float | None
    #: rounds sent and answered, and their rows
    rounds_total: int
    row_rounds_total: int
    #: tokens committed, and those of them that rounds committed; the rest are prefill's
    tokens_total: int
    round_tokens_total: int
    prompt_tokens_total: int
    drafted_total: int
    accepted_total: int
    #: seconds of frames on drafting, the head's half, the way to the tail and back, the tail
    draft_s_total: float
    head_s_total: float
    link_s_total: float
    tail_s_total: float
    #: milliseconds of an empty frame to the tail and back; Mbit/s of the wire's busiest part
    rtt_ms: float | None
    mbit_per_s_up: float | None
    bytes_up_total: int
    bytes_down_total: int
    #: bytes of the GPU's memory in use, by whomever, and all of it; 0 and 0 without a GPU
    gpu_used_bytes: int
    gpu_total_bytes: int
    #: id of the tail, empty before the first
    tail_id: str = ""
    #: None until the tail has told
    tail: TailFigures | None = None
