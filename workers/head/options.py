"""What a head's engine is told once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """See `workers.settings.HeadSettings` for the meaning and the defaults of most of these."""

    head_id: str
    slots: int
    draft_length: int | Literal["auto"]
    max_draft_length: int
    #: lanes that the link has
    lanes: int
    #: use as many of them as measured times ask for; else all
    adapt_lanes: bool
    prefill_chunk: int
    prefix_reuse: bool
    wire_dtype: str
    #: the tail is in this process: hidden states stay on the device
    whole: bool = False
    #: tokens of prefill that end a turn's prefilling; 1: one chunk a turn
    prefill_per_turn: int = 1
    #: where the drafter runs beside the engine, in a thread of its own; None: in the engine's thread
    drafts_apart_on: str | None = None
    #: kind of the drafter, as the head's figures name it
    drafter: str = "none"
    #: when the last job must have ended, in seconds since the epoch; None: never
    ends_at: float | None = None
