"""What the tail knows of every cache slot, and whether a row of work fits it. No torch, no I/O.

`docs/protocol.md` is the state machine; `tests/unit/test_protocol.py` tests it against a model with lost, repeated,
delayed and stale frames.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from relay.messages import Accepted, Draft, History, Prefill, Release, Sampling, TokenLogprobs, Void, VoidReason

#: answers kept per slot for resent rows; above the head's prefill credit for a slot, so that every unanswered row can
#: be repeated
NUM_STORED_ANSWERS = 16

Row = Prefill | Draft | Release
Logprobs = tuple[TokenLogprobs, ...]
A = TypeVar("A", Accepted, Void)


@dataclass(slots=True)
class TailSlot:
    """One slot's state. `filled` cache positions hold committed tokens; `token` is the base token at `filled`."""

    generation: int = -1
    round: int = -1
    filled: int = 0
    #: None while the slot is prefilled, and after its release
    token: int | None = None
    sampling: Sampling | None = None
    answers: OrderedDict[int, Accepted | Void] = field(default_factory=OrderedDict)


class SlotTable:
    """All slots of a tail in one epoch."""

    def __init__(self, slots: int, *, max_length: int, max_query: int, vocab_size: int) -> None:
        self._slots = [TailSlot() for _ in range(slots)]
        self._max_length = max_length
        self._max_query = max_query
        self._vocab_size = vocab_size

    def __getitem__(self, slot: int) -> TailSlot:
        return self._slots[slot]

    def judge(self, row: Row) -> Accepted | Void | None:
        """The stored answer for a repeated row, a void for one that does not fit, None for one to be worked on."""
        if not 0 <= row.slot < len(self._slots):
            return void(row, VoidReason.BOUNDS)
        slot = self._slots[row.slot]
        if row.generation == slot.generation and row.round in slot.answers:
            return slot.answers[row.round]
        reason = self._misfit(slot, row)
        return None if reason is None else void(row, reason)

    def _misfit(self, slot: TailSlot, row: Row) -> VoidReason | None:
        if isinstance(row, Prefill) and row.round == 0:
            return self._misfit_of_start(slot, row)
        if row.generation != slot.generation:
            return VoidReason.GENERATION
        if row.round != slot.round + 1:
            return VoidReason.ROUND
        if isinstance(row, Release):
            return None
        if isinstance(row, Prefill):
            if slot.token is not None or slot.sampling is None or row.copy is not None or row.position != slot.filled:
                return VoidReason.BASE
            return self._misfit_of_chunk(row)
        if slot.token is None or row.token != slot.token or row.position != slot.filled:
            return VoidReason.BASE
        return self._misfit_of_draft(row)

    def _misfit_of_start(self, slot: TailSlot, row: Prefill) -> VoidReason | None:
        if row.generation <= slot.generation:
            return VoidReason.GENERATION
        if row.copy is None:
            return VoidReason.BASE if row.position != 0 else self._misfit_of_chunk(row)
        if not 0 <= row.copy.slot < len(self._slots):
            return VoidReason.COPY
        source = self._slots[row.copy.slot]
        if source.generation != row.copy.generation or not 0 < row.copy.length <= source.filled:
            return VoidReason.COPY
        return VoidReason.BASE if row.position != row.copy.length else self._misfit_of_chunk(row)

    def _misfit_of_chunk(self, row: Prefill) -> VoidReason | None:
        length = row.hidden.shape[0]
        fits = 0 < length <= self._max_query and row.position + length <= self._max_length
        return None if fits and self._is_known(row) else VoidReason.BOUNDS

    def _is_known(self, row: Prefill) -> bool:
        """Whether all tokens that the processors are told of are in the vocabulary, and none are missing."""
        sampling, history = row.sampling, row.history or History((), ())
        told = row.history is not None or not (row.last and sampling.has_penalties)
        biased = (token for token, _ in sampling.logit_bias)
        largest = (max(tokens, default=0) for tokens in (biased, sampling.barred, history.prompt, history.output))
        return told and max(largest) < self._vocab_size

    def _misfit_of_draft(self, row: Draft) -> VoidReason | None:
        length = 1 + len(row.draft)
        fits = length <= self._max_query and row.position + length <= self._max_length
        known = all(0 <= token < self._vocab_size for token in row.draft)
        return None if fits and known else VoidReason.BOUNDS

    def prefilled(self, row: Prefill, token: int | None, logprobs: Logprobs = ()) -> Accepted:
        """Apply a chunk that `judge` let through; `token` is the sampled one of a last chunk, else None."""
        slot = self._slots[row.slot]
        if row.round == 0:
            slot.answers.clear()
            slot.generation, slot.token = row.generation, None
        slot.sampling = row.sampling
        slot.filled = row.position + row.hidden.shape[0]
        slot.token = token
        tokens = () if token is None else (token,)
        return self._answered(slot, row, Accepted(row.slot, row.generation, row.round, 0, tokens, logprobs))

    def verified(self, row: Draft, accepted: int, token: int, logprobs: Logprobs = ()) -> Accepted:
        """Apply a draft row that `judge` let through: `accepted` drafted tokens held, then comes `token`."""
        slot = self._slots[row.slot]
        slot.filled = row.position + 1 + accepted
        slot.token = token
        tokens = (*row.draft[:accepted], token)
        return self._answered(slot, row, Accepted(row.slot, row.generation, row.round, accepted, tokens, logprobs))

    def released(self, row: Release) -> Accepted:
        """Apply a release that `judge` let through."""
        slot = self._slots[row.slot]
        slot.filled, slot.token, slot.sampling = 0, None, None
        return self._answered(slot, row, Accepted(row.slot, row.generation, row.round, 0, ()))

    def spoiled(self, row: Row, reason: VoidReason) -> Void:
        """End a slot's generation: what the layers made of the row is of no use. The caller zeroes the slot's cache."""
        slot = self._slots[row.slot]
        if slot.generation != row.generation:
            slot.answers.clear()
        slot.generation = row.generation
        slot.filled, slot.token, slot.sampling = 0, None, None
        return self._answered(slot, row, void(row, reason))

    def _answered(self, slot: TailSlot, row: Row, answer: A) -> A:
        slot.round = row.round
        slot.answers[row.round] = answer
        while len(slot.answers) > NUM_STORED_ANSWERS:
            slot.answers.popitem(last=False)
        return answer


def void(row: Row, reason: VoidReason) -> Void:
    """The answer to a row that is not applied."""
    return Void(row.slot, row.generation, row.round, reason)
