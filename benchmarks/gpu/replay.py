"""A stand-in for a trained drafter: it costs what a real one costs and is right as often as it is told to be.

The dummy target's next token is always known (`workers.engine.dummy`), so drafts can be made right or wrong at will.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.head.drafters import Drafter, DraftRow, Proposal

#: steps of the bisection that finds an acceptance
_STEPS = 60
#: their multiples are spread evenly over [0, 1), whatever their number: gaps within a slot, and slots
_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927


class ReplayDrafter:
    """Drafts of a real drafter, whose time is spent, replaced by tokens that are right with a fixed probability.

    Which positions of a slot's text are drafted wrong is fixed: the lengths of the right runs between them follow the
    geometric distribution, in an order that keeps their mean over a few rounds near the true one.
    """

    def __init__(self, real: Drafter, acceptance: float, *, step: int, vocabulary: int) -> None:
        """`step`: what the target adds to a token to get the next one."""
        self._real = real
        self._acceptance = acceptance
        self._step = step
        self._vocabulary = vocabulary
        self._wrong: dict[int, list[int]] = {}

    def begin(self, slot: int) -> None:
        self._real.begin(slot)

    def end(self, slot: int) -> None:
        self._real.end(slot)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """As many tokens as the real drafter has for each row."""
        proposals = self._real.propose(rows)
        return [self._replayed(row, len(real.tokens)) for row, real in zip(rows, proposals, strict=True)]

    def _replayed(self, row: DraftRow, length: int) -> Proposal:
        first, base = len(row.tokens), row.tokens[-1]
        wrong = self._wrong_positions(row.slot, first + length)
        tokens = (
            base + self._step * (i + 1) + (self._vocabulary // 2 if first + i in wrong else 0) for i in range(length)
        )
        return Proposal(tuple(token % self._vocabulary for token in tokens), (self._acceptance,) * length)

    def _wrong_positions(self, slot: int, end: int) -> set[int]:
        """The positions below `end`, and maybe some more, at which drafts in this slot are wrong."""
        wrong = self._wrong.setdefault(slot, [-1])
        while wrong[-1] < end:
            drawn = (_PLASTIC * slot + _GOLDEN * len(wrong)) % 1.0
            wrong.append(wrong[-1] + 1 + int(math.log(1.0 - drawn) / math.log(self._acceptance)))
        return set(wrong)


def acceptance_for(tokens_per_round: float, draft_length: int) -> float:
    """The acceptance of a single drafted token with which a round of this draft length commits so many on average.

    A round commits 1 + a + a² + … + a^K tokens. Raises ValueError outside of 1 to K + 1.
    """
    if not 1.0 < tokens_per_round < draft_length + 1:
        raise ValueError(f"{draft_length} drafted tokens cannot give {tokens_per_round} tokens per round")
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if sum(middle**i for i in range(draft_length + 1)) < tokens_per_round:
            low = middle
        else:
            high = middle
    return low
