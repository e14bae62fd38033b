"""Drafting with a small causal language model of the target's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from relay.messages import History
from workers.engine.processors import LogitRow, ProcessorRows, process
from workers.engine.sampling import SamplingRows, choose
from workers.engine.slottables import SlotTables
from workers.head.drafters.drafter import NOTHING, DraftRow, Proposal
from workers.head.prefixes import MIN_COPY, common_length


class DraftModel(Protocol):
    """What drafting needs of `workers.engine.shard.WholeModel`."""

    slots: int
    max_length: int
    max_query: int
    device: torch.device

    def forward(self, tokens: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """Token ids [rows, query] to hidden states [rows, query, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] to float32 logits [n, vocab]."""

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Make the first positions of a slot those of another one."""

    def zero_slot(self, slot: int) -> None:
        """Clear a slot's cache."""

    def draft(
        self, pairs: Sequence[Sequence[int]], rows: Sequence[LogitRow], tables: SlotTables, *, steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """The whole loop at once, where that is recorded; see `workers.engine.drafting.draft_recorded`."""


@dataclass(slots=True)
class _Cached:
    """What a slot's cache holds."""

    #: token at each filled position: committed ones, then drafted ones that may yet be refused
    tokens: list[int] = field(default_factory=list)
    #: how many of them are known to be committed
    num_committed: int = 0
    #: the model gave something that is no number; the slot drafts no more
    broken: bool = False

    def keep_common(self, row: Sequence[int], most: int) -> None:
        """Rewind to the longest common prefix with the committed tokens of `row`, `most` of them at most."""
        most = max(0, min(most, len(self.tokens)))
        place = min(self.num_committed, most)
        while place < most and self.tokens[place] == row[place]:
            place += 1
        del self.tokens[place:]
        self.num_committed = place


class _Step(NamedTuple):
    """One drafted token for each of the rows that still draft."""

    tokens: Tensor  # int64 [rows]
    #: the drafter's own probability of it
    confidence: Tensor  # float32 [rows]


class _Rule(NamedTuple):
    """How the rows' tokens are chosen."""

    sampling: SamplingRows
    #: None if no row has any
    processors: ProcessorRows | None

    @classmethod
    def of(cls, rows: Sequence[DraftRow], device: torch.device) -> _Rule:
        places = [_place(row) for row in rows]
        sampling = SamplingRows.from_rows([row.sampling for row in rows], device)
        return cls(sampling, ProcessorRows.from_rows(places, device))


class ModelDrafter:
    """Drafts token by token with the row's own sampling and processors and the noise that the target will use.

    Each slot has its place in the model's own cache. A round first brings that cache up to the last two
    committed tokens and then feeds these two together: after a round whose draft was accepted to its end, the
    last drafted token is in the text, but was never fed. Rewinding is forgetting: a later token overwrites a
    refused one.
    """

    def __init__(self, model: DraftModel, num_tokens: int) -> None:
        """`model` must have a slot for each of the head's.

        `num_tokens` are the rows of the target's vocabulary: ids beyond are padding of the drafter's, and are
        never drafted.
        """
        self._model = model
        self._num_tokens = num_tokens
        self._cached: dict[int, _Cached] = {}
        self._tables = SlotTables(model.slots, num_tokens, model.device)
        #: how many of a row's tokens the tables know of
        self._counted: dict[int, int] = {}

    def begin(self, slot: int) -> None:
        """What the slot still holds is of use as far as the new row begins alike."""
        self.end(slot)
        self._cached.setdefault(slot, _Cached()).num_committed = 0

    def end(self, slot: int) -> None:
        """Keep what the slot holds, for rows that begin alike; clear it if it saw something that is no number."""
        self._tables.forget(slot)
        self._counted.pop(slot, None)
        if slot in self._cached and self._cached[slot].broken:
            del self._cached[slot]
            self._model.zero_slot(slot)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """The wanted tokens for each row; fewer only at the end of the drafter's cache, none once broken."""
        limits = [self._limit(row) for row in rows]
        # The longest drafts first, so that the rows of every step are a prefix of those of the step before.
        order = sorted((place for place, limit in enumerate(limits) if limit), key=lambda p: -limits[p])
        proposals = [NOTHING] * len(rows)
        if order:
            active = [rows[place] for place in order]
            self._catch_up(active)
            self._count(active)
            drafts = self._draft(active, [limits[place] for place in order])
            for place, proposal in zip(order, drafts, strict=True):
                proposals[place] = proposal
        return proposals

    def _limit(self, row: DraftRow) -> int:
        """Tokens worth drafting. The last one is not fed: it may stand one place behind the drafter's cache."""
        if self._cached[row.slot].broken:
            return 0
        wanted = row.limit if row.effort is None else min(row.limit, row.effort)
        return max(0, min(wanted, self._model.max_length - len(row.tokens) + 1))

    def _catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Feed everything committed but the last two tokens, in chunks, as far as it is not cached."""
        for row in rows:
            self._cached[row.slot].keep_common(row.tokens, len(row.tokens) - 2)
            self._borrow(row)
        while behind := [row for row in rows if len(self._cached[row.slot].tokens) < len(row.tokens) - 2]:
            chunks = [self._next_chunk(row) for row in behind]
            width = max(map(len, chunks))
            starts = [len(self._cached[row.slot].tokens) for row in behind]
            tokens = [chunk + [0] * (width - len(chunk)) for chunk in chunks]
            self._model.forward(*(self._tensor(v) for v in (tokens, [row.slot for row in behind], starts)))
            for row, chunk in zip(behind, chunks, strict=True):
                self._cached[row.slot].tokens += chunk

    def _borrow(self, row: DraftRow) -> None:
        """Copy the longest prefix that another slot holds, if the row's own cache is far behind it."""
        mine, most = self._cached[row.slot], len(row.tokens) - 2
        if most - len(mine.tokens) < MIN_COPY:
            return
        common = {
            slot: common_length(row.tokens, other.tokens, most)
            for slot, other in self._cached.items()
            if slot != row.slot and not other.broken
        }
        best = max(common, key=common.__getitem__, default=row.slot)
        if common.get(best, 0) - len(mine.tokens) >= MIN_COPY:
            self._model.copy_slot(best, row.slot, common[best])
            mine.tokens, mine.num_committed = list(row.tokens[: common[best]]), common[best]

    def _next_chunk(self, row: DraftRow) -> list[int]:
        start = len(self._cached[row.slot].tokens)
        return list(row.tokens[start : min(start + self._model.max_query, len(row.tokens) - 2)])

    def _count(self, rows: Sequence[DraftRow]) -> None:
        """Bring the tables of rows with processors up to their committed tokens."""
        committed: dict[int, Sequence[int]] = {}
        for row in rows:
            if not row.sampling.has_processors:
                continue
            counted = self._counted.get(row.slot)
            if counted is None:
                history = History(tuple(row.tokens[: row.num_prompt]), tuple(row.tokens[row.num_prompt :]))
                self._tables.begin(row.slot, row.sampling, history)
            else:
                committed[row.slot] = row.tokens[counted:]
            self._counted[row.slot] = len(row.tokens)
        self._tables.commit(committed)

    def _draft(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[Proposal]:
        """Draft for rows ordered by falling limit, whose caches end in front of their last two tokens."""
        steps = self._draft_at_once(rows, limits[0]) or self._draft_by_steps(rows, limits)
        return self._collect(rows, limits, steps)

    def _draft_at_once(self, rows: Sequence[DraftRow], most: int) -> list[_Step]:
        """Every row drafts as many tokens as the longest: what nobody asked for is forgotten. Empty if not possible."""
        pairs = [list(row.tokens[-2:]) for row in rows]
        drafted = self._model.draft(pairs, [_place(row) for row in rows], self._tables, steps=most)
        return [] if drafted is None else [_Step(*step) for step in zip(*drafted, strict=True)]

    def _draft_by_steps(self, rows: Sequence[DraftRow], limits: Sequence[int]) -> list[_Step]:
        """Step by step, each only for the rows that still want a token."""
        slots = self._tensor([row.slot for row in rows])
        positions = self._tensor([len(row.tokens) for row in rows])
        rule = _Rule.of(rows, self._model.device)
        hidden = self._feed_last_two(rows, slots)
        steps = [self._choose(hidden, rule, positions, ())]
        for step in range(1, limits[0]):
            count = sum(limit > step for limit in limits)
            if count < len(rule.sampling):
                rule = _Rule.of(rows[:count], self._model.device)
            tokens, places = steps[-1].tokens[:count], positions[:count] + step
            hidden = self._model.forward(tokens.unsqueeze(1), slots[:count], places - 1)[:, 0]
            steps.append(self._choose(hidden, rule, places, steps))
        return steps

    def _feed_last_two(self, rows: Sequence[DraftRow], slots: Tensor) -> Tensor:
        """Hidden states [rows, hidden] of the base tokens; a row of one token is padded behind it."""
        pairs = [list(row.tokens[-2:]) for row in rows]
        starts = self._tensor([len(row.tokens) - len(pair) for row, pair in zip(rows, pairs, strict=True)])
        last = self._tensor([len(pair) - 1 for pair in pairs])
        tokens = self._tensor([pair + [0] * (2 - len(pair)) for pair in pairs])
        hidden = self._model.forward(tokens, slots, starts)
        return hidden[torch.arange(len(rows), device=hidden.device), last]

    def _choose(self, hidden: Tensor, rule: _Rule, positions: Tensor, before: Sequence[_Step]) -> _Step:
        """The next token of every row; `before` are the steps of this round so far."""
        logits = self._model.logits(hidden)[:, : self._num_tokens]
        if rule.processors is not None:
            drafted = torch.stack([step.tokens[: len(hidden)] for step in before], dim=1) if before else None
            logits = process(logits, rule.processors, self._tables, positions, drafted)
        tokens = choose(logits, rule.sampling, positions)
        chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return _Step(tokens, (chosen - logits.logsumexp(dim=-1)).exp())

    def _collect(self, rows: Sequence[DraftRow], limits: Sequence[int], steps: Sequence[_Step]) -> list[Proposal]:
        """Read the drafts back, all of them at once, and note what the caches hold now."""
        tokens = torch.cat([step.tokens for step in steps]).tolist()
        confidence = torch.cat([step.confidence for step in steps]).tolist()
        begins = list(accumulate((len(step.tokens) for step in steps), initial=0))
        proposals = []
        for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            mine = [begin + place for begin in begins[:limit]]
            draft = [tokens[i] for i in mine]
            cached = self._cached[row.slot]
            cached.tokens += [*row.tokens[-2:], *draft[:-1]]
            cached.num_committed = len(row.tokens)
            cached.broken = not all(math.isfinite(confidence[i]) for i in mine)
            proposals.append(NOTHING if cached.broken else Proposal(tuple(draft), tuple(confidence[i] for i in mine)))
        return proposals

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)


def _place(row: DraftRow) -> LogitRow:
    """Where the row's first drafted token belongs."""
    return LogitRow(row.slot, row.sampling, len(row.tokens))
