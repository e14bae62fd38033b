"""Plain decoding: no drafts."""

from __future__ import annotations

from collections.abc import Sequence

from workers.head.drafters.drafter import NOTHING, DraftRow, Proposal


class NoDrafter:
    """Proposes nothing, so that every round commits one token."""

    def begin(self, slot: int) -> None:
        """Nothing is kept for a slot."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """An empty proposal for each row."""
        return [NOTHING] * len(rows)

    def end(self, slot: int) -> None:
        """Nothing is kept for a slot."""
