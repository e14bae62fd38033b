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
