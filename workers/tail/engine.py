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
from workers.engine.tensors import from_wire
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

    @torch.inference_mode()
    def answer(self, frame: Prefill | Round | Release) -> Verdict:
        """The verdict on a frame, row by row; rows that do not fit the slot's state come back void."""
        if isinstance(frame, Round):
            return self.answer_rounds([frame])[0]
        started = time.perf_counter()
        match frame:
            case Prefill():
                row: Accepted | Void = self._table.judge(frame) or self._prefill_if_it_fits(frame)
            case Release():
                row = self._table.judge(frame) or self._release(frame)
        return Verdict(frame.number, (row,), time.perf_counter() - started)

    @torch.inference_mode()
    def answer_rounds(self, frames: Sequence[Round]) -> list[Verdict]:
        """The verdicts on rounds that run as one forward; no slot stands in two of the frames.

        Each verdict tells its share of the time, by the positions its rows bring. Rounds that find no memory
        together are run one after the other; the rows of one that finds none by itself come back void.
        """
        try:
            with memory_watched(self._shard.device):
                return self._answer_rounds(frames)
        except OutOfMemory as error:
            log.warning("no memory for %d rounds, %d rows: %s", len(frames), sum(len(f.rows) for f in frames), error)
        free_unused(self._shard.device)
        if len(frames) > 1:
            return [self.answer_rounds([frame])[0] for frame in frames]
        (frame,) = frames
        rows = [self._table.judge(row) or self._spoil(row, VoidReason.OUT_OF_MEMORY) for row in frame.rows]
        return [Verdict(frame.number, tuple(rows), 0.0)]

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

    def _prefill_if_it_fits(self, chunk: Prefill) -> Accepted | Void:
        try:
            with memory_watched(self._shard.device):
                return self._prefill(chunk)
        except OutOfMemory as error:
            log.warning("no memory for a prefill of %d tokens: %s", chunk.hidden.shape[0], error)
        free_unused(self._shard.device)
        return self._spoil(chunk, VoidReason.OUT_OF_MEMORY)

    def _prefill(self, chunk: Prefill) -> Accepted | Void:
        if not self._is_hidden(chunk.hidden.shape):
            return void(chunk, VoidReason.BOUNDS)
        if chunk.copy is not None and chunk.copy.slot != chunk.slot:
            self._shard.copy_slot(chunk.copy.slot, chunk.slot, chunk.copy.length)
        output = self._forward(self._hidden(chunk)[None], [chunk.slot], [chunk.position])
        # Every chunk, not only the last: the job may be stopped before that, and the slot be used by another one.
        if not bool(torch.isfinite(output).all()):
            return self._spoil(chunk, VoidReason.NON_FINITE)
        if not chunk.last:
            return self._table.prefilled(chunk, None)
        logits = self._shard.logits(output[:, -1])
        if not bool(torch.isfinite(logits).all()):
            return self._spoil(chunk, VoidReason.NON_FINITE)
        return self._table.prefilled(chunk, *self._chooser.first(logits, chunk))

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

    def _spoil(self, row: Prefill | Draft, reason: VoidReason) -> Void:
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
