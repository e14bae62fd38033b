"""What a bookkeeper knows of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BookkeeperStatus:
    """At one moment."""

    #: else another one is at work
    active: bool
    #: nothing is fed: the queue server is short of memory
    feeder_paused: bool
