"""What the tail chooses at each position, and what of it the slots' processors have to know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from relay.messages import Draft, Prefill, Sampling, TokenLogprobs
from workers.engine.logprobs import token_logprobs
from workers.engine.processors import LogitRow, ProcessorRows, draft_prefixes, process
from workers.engine.sampling import SamplingRows, choose
from workers.engine.slottables import SlotTables


class DraftRow(NamedTuple):
    """A draft that is to be verified, and its slot's sampling."""

    draft: Draft
    sampling: Sampling

    @property
    def num_logits(self) -> int:
        """The base token's row of logits, and one for each drafted token."""
        return 1 + len(self.draft.draft)


class Committed(NamedTuple):
    """What a verdict commits: the accepted tokens and the next one."""

    row: DraftRow
    #: its first one's place among the packed logits
    place: int
    tokens: tuple[int, ...]


class Chooser:
    """Chooses one epoch's tokens. The tables are the half's: they outlive the epoch."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        tables.clear()

    def first(self, logits: torch.Tensor, chunk: Prefill) -> tuple[int, tuple[TokenLogprobs, ...]]:
        """The token behind a last chunk of prefill, committed. `logits` [1, vocab] are finite."""
        self._tables.begin(chunk.slot, chunk.sampling, chunk.history)
        row = LogitRow(chunk.slot, chunk.sampling, chunk.position + chunk.hidden.shape[0])
        chosen = self._choose(logits, [row], None)
        token, num_top = int(chosen), chunk.sampling.logprobs
        logprobs = () if num_top is None else tuple(token_logprobs(logits, chosen, [num_top]))
        self._tables.commit({chunk.slot: (token,)})
        return token, logprobs

    def choices(self, logits: torch.Tensor, rows: Sequence[DraftRow]) -> torch.Tensor:
        """The target's own token at every place: packed logits [sum(num_logits), vocab] to int64 [sum(num_logits)]."""
        places = [
            LogitRow(draft.slot, sampling, draft.position + 1 + depth)
            for draft, sampling in rows
            for depth in range(1 + len(draft.draft))
        ]
        counted = any(sampling.has_penalties for _, sampling in rows)
        prefixes = draft_prefixes([draft.draft for draft, _ in rows], logits.device) if counted else None
        return self._choose(logits, places, prefixes)

    def commit(self, logits: torch.Tensor, committed: Sequence[Committed]) -> list[tuple[TokenLogprobs, ...]]:
        """Count what is committed; the log probabilities of those that ask for them, () for the others."""
        wanted = [(row.sampling.logprobs, place, tokens) for row, place, tokens in committed]
        places = [place + i for num, place, tokens in wanted if num is not None for i in range(len(tokens))]
        chosen = [token for num, _, tokens in wanted if num is not None for token in tokens]
        num_top = [num for num, _, tokens in wanted if num is not None for _ in tokens]
        logprobs = iter(token_logprobs(*_at(logits, places, chosen), num_top)) if places else iter(())
        self._tables.commit({row.draft.slot: tokens for row, _, tokens in committed})
        return [() if num is None else tuple(next(logprobs) for _ in tokens) for num, _, tokens in wanted]

    def forget(self, slot: int) -> None:
        """The slot's generation is over."""
        self._tables.forget(slot)

    def _choose(self, logits: torch.Tensor, rows: Sequence[LogitRow], prefixes: torch.Tensor | None) -> torch.Tensor:
        device = logits.device
        positions = torch.as_tensor([row.position for row in rows], device=device)
        scores = process(logits, ProcessorRows.from_rows(rows, device), self._tables, positions, prefixes)
        return choose(scores, SamplingRows.from_rows([row.sampling for row in rows], device), positions)


def first_places(rows: Sequence[DraftRow]) -> list[int]:
    """Where each row's logits begin among the packed ones."""
    return list(accumulate((row.num_logits for row in rows), initial=0))[:-1]


def _at(logits: torch.Tensor, places: Sequence[int], chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    device = logits.device
    return logits[torch.as_tensor(places, device=device)], torch.as_tensor(chosen, device=device)
