"""What the tail chooses at each position, and what of it the slots' processors have to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from relay.messages import Draft, Prefill, Sampling, TokenLogprobs
from workers.engine.choosing import choose_at
from workers.engine.logprobs import token_logprobs
from workers.engine.processors import LogitRow
from workers.engine.slottables import SlotTables


class Committed(NamedTuple):
    """What a verdict commits: the accepted tokens and the next one."""

    draft: Draft
    sampling: Sampling
    #: its first one's place among the packed logits
    place: int
    tokens: tuple[int, ...]


class Chooser:
    """Chooses one epoch's tokens. The tables are the half's: they outlive the epoch."""

    def __init__(self, tables: SlotTables) -> None:
        self.tables = tables
        tables.clear()

    def first(self, logits: torch.Tensor, chunks: Sequence[Prefill]) -> list[tuple[int, tuple[TokenLogprobs, ...]]]:
        """The tokens behind last chunks of prefill, committed. `logits` [chunks, vocab] are finite."""
        if not chunks:
            return []
        for chunk in chunks:
            self.tables.begin(chunk.slot, chunk.sampling, chunk.history)
        rows = [LogitRow(chunk.slot, chunk.sampling, chunk.position + chunk.hidden.shape[0]) for chunk in chunks]
        chosen = choose_at(logits, rows, self.tables, None)
        tokens, wanted = chosen.tolist(), [chunk.sampling.logprobs for chunk in chunks]
        places = [place for place, num_top in enumerate(wanted) if num_top is not None]
        num_top = [num for num in wanted if num is not None]
        chosen_there = [tokens[place] for place in places]
        told = iter(token_logprobs(*_at(logits, places, chosen_there), num_top) if places else ())
        self.tables.commit({chunk.slot: (token,) for chunk, token in zip(chunks, tokens, strict=True)})
        return [(token, () if num is None else (next(told),)) for token, num in zip(tokens, wanted, strict=True)]

    def commit(self, logits: torch.Tensor | None, committed: Sequence[Committed]) -> list[tuple[TokenLogprobs, ...]]:
        """Count what is committed; the log probabilities of those that ask for them, () for the others.

        `logits` [n, vocab] are the model's own; None if nobody asks.
        """
        wanted = [(sampling.logprobs, place, tokens) for _, sampling, place, tokens in committed]
        places = [place + i for num, place, tokens in wanted if num is not None for i in range(len(tokens))]
        chosen = [token for num, _, tokens in wanted if num is not None for token in tokens]
        num_top = [num for num, _, tokens in wanted if num is not None for _ in tokens]
        logprobs = iter(() if logits is None else token_logprobs(*_at(logits, places, chosen), num_top))
        self.tables.commit({draft.slot: tokens for draft, _, _, tokens in committed})
        return [() if num is None else tuple(next(logprobs) for _ in tokens) for num, _, tokens in wanted]

    def forget(self, slot: int) -> None:
        """The slot's generation is over."""
        self.tables.forget(slot)


def _at(logits: torch.Tensor, places: Sequence[int], chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    device = logits.device
    return logits[torch.as_tensor(places, device=device)].float(), torch.as_tensor(chosen, device=device)
