"""Suffix drafts where the text repeats something, the model's elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from workers.head.drafters.drafter import Drafter, DraftRow, Proposal

#: a first token this sure makes a suffix draft the better one: about six matched tokens whose occurrences agree
GOOD_MATCH = 0.75


class HybridDrafter:
    """Asks the suffix drafter for every row and the model only for those without a good match.

    The model sees a row again after any number of rounds: it catches up on what was committed meanwhile.
    """

    def __init__(self, suffix: Drafter, model: Drafter) -> None:
        self._suffix = suffix
        self._model = model

    def begin(self, slot: int) -> None:
        """Both start the slot anew."""
        self._suffix.begin(slot)
        self._model.begin(slot)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """The suffix draft of a row, or the model's where that may know better."""
        proposals = self._suffix.propose(rows)
        unsure = [
            place
            for place, (row, proposal) in enumerate(zip(rows, proposals, strict=True))
            if not is_good(proposal) and _may_ask_model(row)
        ]
        if unsure:
            drafted = self._model.propose([rows[place] for place in unsure])
            for place, proposal in zip(unsure, drafted, strict=True):
                if proposal.tokens:  # else the model's cache is full, and a poor match better than nothing
                    proposals[place] = proposal
        return proposals

    def end(self, slot: int) -> None:
        """Both forget the slot's generation, as far as they do."""
        self._suffix.end(slot)
        self._model.end(slot)


def is_good(proposal: Proposal) -> bool:
    """Whether a suffix draft is kept without asking the model."""
    return bool(proposal.tokens) and proposal.confidence[0] >= GOOD_MATCH


def _may_ask_model(row: DraftRow) -> bool:
    return row.limit > 0 and row.effort != 0
