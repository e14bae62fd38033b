"""Prompt lookup: what followed the last few tokens the last time they stood in this prompt or its output.

(Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.)
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.head.drafters.drafter import NOTHING, DraftRow, Proposal

#: tokens at the end of a row that must have stood there before, at most and at least
LONGEST_MATCH = 4
SHORTEST_MATCH = 2


class NgramDrafter:
    """Drafts by the most recent earlier occurrence of the longest match.

    The tokens of a row are indexed once, as they come: a proposal costs a few dictionary look-ups.
    """

    def __init__(self, longest: int = LONGEST_MATCH, shortest: int = SHORTEST_MATCH) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"match lengths must be 1 <= shortest <= longest, not {shortest} and {longest}")
        self._longest = longest
        self._shortest = shortest
        self._indexes: dict[int, NgramIndex] = {}

    def begin(self, slot: int) -> None:
        """Start the slot with an empty index."""
        self._indexes[slot] = NgramIndex(self._longest, self._shortest)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """A continuation for each row whose end matches something earlier, else nothing."""
        return [self._propose_row(row) for row in rows]

    def end(self, slot: int) -> None:
        """Drop the slot's index."""
        self._indexes.pop(slot, None)

    def _propose_row(self, row: DraftRow) -> Proposal:
        index = self._indexes[row.slot]
        index.extend(row.tokens[len(index) :])
        length, tokens = index.continuation(row.limit)
        if not tokens:
            return NOTHING
        # Not measured, but ordered right: a longer match is surer.
        return Proposal(tuple(tokens), (length / (length + 1),) * len(tokens))


class NgramIndex:
    """A growing row of tokens, with the place behind the last occurrence of each of its n-grams."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        #: n-gram -> place of the token behind its last occurrence; the row's very end has none behind it yet
        self._behind: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the row."""
        for token in tokens:
            place = len(self._tokens)
            for length in self._lengths:
                if length <= place:
                    self._behind[tuple(self._tokens[place - length :])] = place
            self._tokens.append(token)

    def continuation(self, limit: int) -> tuple[int, list[int]]:
        """Length of the longest match of the row's end, and `limit` tokens that followed it; (0, []) if none.

        A continuation that reaches the row's end goes on into itself, so a loop is drafted round and round.
        """
        for length in self._lengths:
            place = self._behind.get(tuple(self._tokens[-length:])) if length <= len(self) else None
            if place is not None:
                period = len(self) - place
                return length, [self._tokens[place + i % period] for i in range(limit)]
        return 0, []
