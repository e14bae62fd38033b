"""The seam of drafting: whatever guesses the next tokens, the target verifies them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relay.messages import Sampling


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One slot that wants a draft."""

    slot: int
    #: prompt and committed tokens; the last one is the base token. Between `begin` and `end` of the slot this
    #: only grows: what was drafted and refused was never in it. It may be the engine's own list: a drafter that
    #: keeps it until `end` finds the job's last tokens there.
    tokens: Sequence[int]
    sampling: Sampling
    #: most tokens to draft; 0 asks for none
    limit: int
    #: most tokens worth a model's steps; what is drafted from a table costs nothing and goes up to `limit`.
    #: None: as many as `limit`
    effort: int | None = None
    #: how many of `tokens` are the prompt; the others are output, which penalties count
    num_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What may follow a row's base token; token `i` stands at absolute position `len(row.tokens) + i`."""

    tokens: tuple[int, ...]
    #: how sure the drafter is of each token, 0..1
    confidence: tuple[float, ...]


#: the answer of a drafter that has nothing to say
NOTHING = Proposal((), ())


class Drafter(Protocol):
    """Drafts for many slots at once. A poor or empty proposal costs time only, never changes a text."""

    def begin(self, slot: int) -> None:
        """A new generation starts in `slot`: nothing remembered of the slot holds any more."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """At most `limit` tokens for each row, in the order of `rows`; no slot stands in two rows."""

    def end(self, slot: int) -> None:
        """The slot's generation is over; also for a slot that never asked for a draft."""
