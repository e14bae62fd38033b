"""What is done to logits before a token is chosen from them: penalties, biases, barred tokens.

In this order: the repetition penalty of `transformers` (`RepetitionPenaltyLogitsProcessor`, Keskar et al. 2019, arXiv
1909.05858), over prompt and output; OpenAI's presence and frequency penalties, over the output; the logit bias; barred
tokens. The output of a row is what its slot has committed *and the drafted tokens in front of the row*: if they hold,
the row has the logits that it has without speculation, to the last bit, and if they do not, nobody uses it.

All of it is elementwise, in float32: a row does not depend on the others, and one without processors is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from relay.messages import Sampling
from workers.engine.slottables import SlotTables

_LOWEST = torch.finfo(torch.float32).min


class LogitRow(NamedTuple):
    """Where a row of logits belongs."""

    slot: int
    sampling: Sampling
    #: absolute position of the token that is chosen from it
    position: int

    @property
    def is_processed(self) -> bool:
        """Whether its tokens are chosen from anything but the model's own logits."""
        return self.sampling.has_penalties or bool(self.sampling.logit_bias) or self.is_barred

    @property
    def is_barred(self) -> bool:
        """Whether some tokens may not be chosen yet."""
        return bool(self.sampling.barred) and self.position < self.sampling.free_from


@dataclass(frozen=True, slots=True)
class ProcessorRows:
    """The parameters of those `m` of `n` rows of logits that have processors, as tensors on their device.

    Which rows need what is decided on the host: nothing is read back from the device.
    """

    #: places of the `m` rows among all, and their slots
    places: Tensor  # int64 [m]
    slots: Tensor  # int64 [m]
    repetition: Tensor  # float32 [m, 1], 1 = off
    presence: Tensor  # float32 [m, 1], 0 = off
    frequency: Tensor  # float32 [m, 1], 0 = off
    free_from: Tensor  # int64 [m, 1]
    #: whether any row has penalties, a bias, barred tokens
    with_penalties: bool
    with_bias: bool
    with_barred: bool

    @classmethod
    def from_rows(cls, rows: Sequence[LogitRow], device: torch.device | str) -> ProcessorRows | None:
        """The tensors of `rows`, good for these positions and later ones; None if no row has processors."""
        places = [place for place, row in enumerate(rows) if row.is_processed]
        mine = [rows[place].sampling for place in places]
        if not mine:
            return None

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)

        return cls(
            places=torch.tensor(places, dtype=torch.int64, device=device),
            slots=torch.tensor([rows[place].slot for place in places], dtype=torch.int64, device=device),
            repetition=column([sampling.repetition_penalty for sampling in mine]),
            presence=column([sampling.presence_penalty for sampling in mine]),
            frequency=column([sampling.frequency_penalty for sampling in mine]),
            free_from=column([sampling.free_from for sampling in mine], torch.int64),
            with_penalties=any(sampling.has_penalties for sampling in mine),
            with_bias=any(sampling.logit_bias for sampling in mine),
            with_barred=any(rows[place].is_barred for place in places),
        )


def process(
    logits: Tensor, rows: ProcessorRows | None, tables: SlotTables, positions: Tensor, prefixes: Tensor | None = None
) -> Tensor:
    """The logits to choose from; `logits` itself where no row has processors.

    Args:
        logits: float32 [n, vocab], finite; left as they are. A vocabulary smaller than that of the tables is its
            beginning.
        rows: which of the rows have processors, and which; None if none has.
        tables: what the rows' slots have committed.
        positions: int64 [n], absolute position of the token being chosen.
        prefixes: int64 [n, K], the drafted tokens in front of each row, negative behind their end; None for none.

    Returns:
        float32 [n, vocab], finite but for barred tokens, which are -inf.
    """
    if rows is None:
        return logits
    mine, width = rows.places, logits.shape[-1]
    scores = logits.index_select(0, mine)
    if rows.with_penalties:
        scores = _penalised(scores, rows, tables, None if prefixes is None else prefixes.index_select(0, mine))
    if rows.with_bias:
        scores = scores + _rows_of(tables.bias, rows.slots, width)
    # parameters without measure may have left the float32 numbers
    scores = scores.nan_to_num(nan=_LOWEST)
    if rows.with_barred:
        still = positions.index_select(0, mine).unsqueeze(-1) < rows.free_from
        scores = scores.masked_fill(_rows_of(tables.barred, rows.slots, width) & still, float("-inf"))
    return logits.index_copy(0, mine, scores)


def draft_prefixes(drafts: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """`prefixes` of rows that follow each other as base token and draft: int64 [sum(1 + len(draft)), K]."""
    longest = max(map(len, drafts), default=0)
    rows = [[*draft[:length], *[-1] * (longest - length)] for draft in drafts for length in range(len(draft) + 1)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _penalised(scores: Tensor, rows: ProcessorRows, tables: SlotTables, prefixes: Tensor | None) -> Tensor:
    width = scores.shape[-1]
    counts = _rows_of(tables.counts, rows.slots, width)
    if prefixes is not None and prefixes.shape[1]:
        counts = counts.scatter_add(1, prefixes.clamp(min=0), (prefixes >= 0).to(counts.dtype))
    held = counts > 0
    known = held if tables.prompted is None else held | _rows_of(tables.prompted, rows.slots, width)
    scores = torch.where(known, torch.where(scores < 0, scores * rows.repetition, scores / rows.repetition), scores)
    return scores - rows.frequency * counts - rows.presence * held


def _rows_of(table: Tensor | None, slots: Tensor, width: int) -> Tensor:
    """The slots' rows of a table [slots + 1, vocab]: [m, width]."""
    assert table is not None, "a slot was begun with the sampling that its rows have"
    return table[:, :width].index_select(0, slots)
