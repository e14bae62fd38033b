"""The tail's half of a round: judge the rows, run the second half of the model, choose, verify, answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from relay.messages import Accepted, Draft, Prefill, Release, Round, Sampling, Verdict, Void, VoidReason
from workers.engine.processors import LogitRow
from workers.engine.shard import TailShard
from workers.engine.slottables import SlotTables
from workers.engine.tensors import from_wire, pack_rows, pad_rows
from workers.engine.verification import VerifyRows, verify_rows
from workers.errors import OutOfMemory
from workers.memory import free_unused, memory_watched
from workers.tail.chooser import Chooser, Committed
from workers.tail.slots import SlotTable, void

log = logging.getLogger(__name__)


class _Fresh(NamedTuple):
    """A row of a round that fits its slot, and its hidden states [1 + draft, hidden]."""

    row: Draft
    hidden: torch.Tensor


class TailEngine:
    """Answers every frame of one epoch with a verdict. Owns the epoch's slot table; the shard outlives it."""

    def __init__(self, shard: TailShard, *, slots: int, max_query: int, tables: SlotTables | None = None) -> None:
        """`tables`: those of the shard, if another epoch had them before; they are cleared."""
        self._shard = shard
        self._chooser = Chooser(tables or SlotTables(shard.slots, shard.vocab_size, shard.device))
        self._table = SlotTable(slots, max_length=shard.max_length, max_query=max_query, vocab_size=shard.vocab_size)

    def answer(self, frame: Prefill | Round | Release) -> Verdict:
        """The verdict on a frame, row by row; rows that do not fit the slot's state come back void."""
        return self.answer_all([frame])[0]

    @torch.inference_mode()
    def answer_all(self, frames: Sequence[Prefill | Round | Release]) -> list[Verdict]:
        """The verdicts on frames of one kind that run as one forward; no slot stands in two of them.

        Each verdict tells its share of the time, by the positions its rows bring. Frames that find no memory
        together are run one after the other; the rows of one that finds none by itself come back void.
        """
        try:
            with memory_watched(self._shard.device):
                return self._answer_all(frames)
        except OutOfMemory as error:
            rows = [row for frame in frames for row in _rows(frame)]
            log.warning("no memory for %d frames, %d rows: %s", len(frames), len(rows), error)
        free_unused(self._shard.device)
        if len(frames) > 1:
            return [self.answer(frame) for frame in frames]
        (frame,) = frames
        answers = [self._table.judge(row) or self._spoil(row, VoidReason.OUT_OF_MEMORY) for row in _rows(frame)]
        return [Verdict(frame.number, tuple(answers), 0.0)]

    def _answer_all(self, frames: Sequence[Prefill | Round | Release]) -> list[Verdict]:
        rounds = [frame for frame in frames if isinstance(frame, Round)]
        if rounds:
            return self._answer_rounds(rounds)
        started = time.perf_counter()
        rows = [frame for frame in frames if not isinstance(frame, Round)]
        judged = [self._table.judge(row) for row in rows]
        fresh = [row for row, answer in zip(rows, judged, strict=True) if answer is None and isinstance(row, Prefill)]
        prefilled = iter(self._prefill(fresh))
        answers = [
            answer or (self._release(row) if isinstance(row, Release) else next(prefilled))
            for row, answer in zip(rows, judged, strict=True)
        ]
        spent, sizes = time.perf_counter() - started, [_num_tokens(row) for row in rows]
        return [
            Verdict(row.number, (answer,), spent * size / sum(sizes))
            for row, answer, size in zip(rows, answers, sizes, strict=True)
        ]

    def _answer_rounds(self, frames: Sequence[Round]) -> list[Verdict]:
        started = time.perf_counter()
        judged = [self._judge(frame) for frame in frames]
        fresh = [row for rows in judged for row in rows if isinstance(row, _Fresh)]
        if fresh:
            verified = iter(self._verify(fresh))
            judged = [[next(verified) if isinstance(row, _Fresh) else row for row in rows] for rows in judged]
        answers = [tuple(row for row in rows if not isinstance(row, _Fresh)) for rows in judged]
        spent = time.perf_counter() - started
        shares = [len(frame.rows) * (1 + max(len(row.draft) for row in frame.rows)) for frame in frames]
        return [
            Verdict(frame.number, rows, spent * share / sum(shares))
            for frame, rows, share in zip(frames, answers, shares, strict=True)
        ]

    def _prefill(self, chunks: Sequence[Prefill]) -> list[Accepted | Void]:
        """Run chunks of different slots as one; where one has a copy, its source is none of them."""
        answers: dict[int, Accepted | Void] = {
            chunk.slot: void(chunk, VoidReason.BOUNDS) for chunk in chunks if not self._is_hidden(chunk.hidden.shape)
        }
        fitting = [chunk for chunk in chunks if chunk.slot not in answers]
        if fitting:
            ends, sound = self._fill(fitting)
            # Every chunk, not only the last: the job may be stopped before that, and the slot be used by another one.
            for chunk in (chunk for chunk, each in zip(fitting, sound, strict=True) if not each):
                answers[chunk.slot] = self._spoil(chunk, VoidReason.NON_FINITE)
            answers |= self._begin([chunk for chunk in fitting if chunk.last and chunk.slot not in answers], ends)
        return [answers.get(chunk.slot) or self._table.prefilled(chunk, None) for chunk in chunks]

    def _fill(self, chunks: Sequence[Prefill]) -> tuple[dict[int, torch.Tensor], list[bool]]:
        """The last token's hidden states [hidden] by slot, and whether all of each chunk's are finite."""
        for chunk in chunks:
            if chunk.copy is not None and chunk.copy.slot != chunk.slot:
                self._shard.copy_slot(chunk.copy.slot, chunk.slot, chunk.copy.length)
        counts = [chunk.hidden.shape[0] for chunk in chunks]
        hidden = pad_rows(torch.cat([self._hidden(chunk) for chunk in chunks]), counts)
        output = self._forward(hidden, [chunk.slot for chunk in chunks], [chunk.position for chunk in chunks])
        packed = torch.split(pack_rows(output, counts), counts)
        finite = torch.stack([states.isfinite().all() for states in packed])
        return {chunk.slot: states[-1] for chunk, states in zip(chunks, packed, strict=True)}, finite.tolist()

    def _begin(self, chunks: Sequence[Prefill], ends: dict[int, torch.Tensor]) -> dict[int, Accepted | Void]:
        """Choose the first tokens behind last chunks, whose hidden states are `ends`; answers by slot."""
        if not chunks:
            return {}
        logits = self._shard.logits(torch.stack([ends[chunk.slot] for chunk in chunks]))
        sound = logits.isfinite().all(dim=-1)
        begun = [chunk for chunk, each in zip(chunks, sound.tolist(), strict=True) if each]
        answers: dict[int, Accepted | Void] = {
            chunk.slot: self._table.prefilled(chunk, *first)
            for chunk, first in zip(begun, self._chooser.first(logits[sound], begun), strict=True)
        }
        for chunk in (chunk for chunk in chunks if chunk.slot not in answers):
            answers[chunk.slot] = self._spoil(chunk, VoidReason.NON_FINITE)
        return answers

    def _release(self, row: Release) -> Accepted:
        self._chooser.forget(row.slot)
        return self._table.released(row)

    def _judge(self, frame: Round) -> list[Accepted | Void | _Fresh]:
        """Every row's answer, or the work to find it."""
        counts = [1 + len(row.draft) for row in frame.rows]
        if frame.hidden.shape[:1] != (sum(counts),) or not self._is_hidden(frame.hidden.shape):
            return [void(row, VoidReason.BOUNDS) for row in frame.rows]
        answers: list[Accepted | Void | _Fresh] = []
        slots: set[int] = set()
        for row, hidden in zip(frame.rows, torch.split(self._hidden(frame), counts), strict=True):
            judged = void(row, VoidReason.ROUND) if row.slot in slots else self._table.judge(row)
            slots.add(row.slot)
            answers.append(_Fresh(row, hidden) if judged is None else judged)
        return answers

    def _verify(self, fresh: Sequence[_Fresh]) -> list[Accepted | Void]:
        """Run rows through the half and judge their drafts."""
        rows, samplings = [row for row, _ in fresh], [self._sampling(row) for row, _ in fresh]
        work = VerifyRows(
            hidden=torch.cat([hidden for _, hidden in fresh]),
            rows=[
                LogitRow(row.slot, sampling, row.position + 1) for row, sampling in zip(rows, samplings, strict=True)
            ],
            drafts=[row.draft for row in rows],
        )
        verified = verify_rows(self._shard, self._chooser.tables, work)
        ends = zip(verified.places, verified.accepted, verified.following, strict=True)
        committed = [
            Committed(row, sampling, place, (*row.draft[:accepted], token))
            for row, sampling, (place, accepted, token) in zip(rows, samplings, ends, strict=True)
        ]
        return self._apply(verified.logits, committed, verified.finite)

    def _apply(
        self, logits: torch.Tensor | None, committed: Sequence[Committed], finite: Sequence[bool]
    ) -> list[Accepted | Void]:
        """Commit the rows whose logits were finite, spoil the others."""
        logprobs = iter(
            self._chooser.commit(logits, [each for each, sound in zip(committed, finite, strict=True) if sound])
        )
        return [
            self._table.verified(draft, len(tokens) - 1, tokens[-1], next(logprobs))
            if sound
            else self._spoil(draft, VoidReason.NON_FINITE)
            for (draft, _, _, tokens), sound in zip(committed, finite, strict=True)
        ]

    def _spoil(self, row: Prefill | Draft | Release, reason: VoidReason) -> Void:
        # NaN behind a mask still poisons attention, so the slot's cache must not keep any.
        self._shard.zero_slot(row.slot)
        self._chooser.forget(row.slot)
        return self._table.spoiled(row, reason)

    def _sampling(self, row: Draft) -> Sampling:
        sampling = self._table[row.slot].sampling
        assert sampling is not None  # `judge` lets no draft row of an unprefilled slot through
        return sampling

    def _forward(self, hidden: torch.Tensor, slots: list[int], starts: list[int]) -> torch.Tensor:
        return self._shard.forward(hidden, torch.tensor(slots), torch.tensor(starts))

    def _hidden(self, frame: Prefill | Round) -> torch.Tensor:
        return from_wire(frame.hidden, dtype=self._shard.dtype, device=self._shard.device)

    def _is_hidden(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[1] == self._shard.hidden_size


def _rows(frame: Prefill | Round | Release) -> Sequence[Prefill | Draft | Release]:
    return frame.rows if isinstance(frame, Round) else [frame]


def _num_tokens(row: Prefill | Release) -> int:
    return row.hidden.shape[0] if isinstance(row, Prefill) else 1
