"""The tail's half of a round: judge the rows, run the second half of the model, choose, verify, answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from relay.messages import Accepted, Draft, Prefill, Release, Round, Sampling, Verdict, Void, VoidReason
from workers.engine.sampling import SamplingRows, choose
from workers.engine.shard import TailShard
from workers.engine.tensors import from_wire, pack_rows, pad_rows
from workers.engine.verify import verify
from workers.tail.slots import SlotTable, void


class TailEngine:
    """Answers every frame of one epoch with a verdict. Owns the epoch's slot table; the shard outlives it."""

    def __init__(self, shard: TailShard, *, slots: int, max_query: int) -> None:
        self._shard = shard
        self._table = SlotTable(slots, max_length=shard.max_length, max_query=max_query, vocab_size=shard.vocab_size)

    @torch.inference_mode()
    def answer(self, frame: Prefill | Round | Release) -> Verdict:
        """The verdict on a frame, row by row; rows that do not fit the slot's state come back void."""
        started = time.perf_counter()
        match frame:
            case Prefill():
                rows: tuple[Accepted | Void, ...] = (self._table.judge(frame) or self._prefill(frame),)
            case Round():
                rows = self._round(frame)
            case Release():
                rows = (self._table.judge(frame) or self._table.released(frame),)
        return Verdict(frame.number, rows, time.perf_counter() - started)

    def _prefill(self, chunk: Prefill) -> Accepted | Void:
        if not self._is_hidden(chunk.hidden.shape):
            return void(chunk, VoidReason.BOUNDS)
        if chunk.copy is not None:
            self._shard.copy_slot(chunk.copy.slot, chunk.slot, chunk.copy.length)
        output = self._forward(self._hidden(chunk)[None], [chunk.slot], [chunk.position])
        if not chunk.last:
            return self._table.prefilled(chunk, None)
        logits = self._shard.logits(output[:, -1])
        if not bool(torch.isfinite(logits).all()):
            return self._spoil(chunk)
        position = chunk.position + chunk.hidden.shape[0]
        return self._table.prefilled(chunk, int(self._choose(logits, [chunk.sampling], [position])))

    def _round(self, frame: Round) -> tuple[Accepted | Void, ...]:
        if frame.hidden.shape[:1] != (sum(1 + len(row.draft) for row in frame.rows),) or not self._is_hidden(
            frame.hidden.shape
        ):
            return tuple(void(row, VoidReason.BOUNDS) for row in frame.rows)
        answers: dict[int, Accepted | Void] = {}
        fresh: list[int] = []
        slots: set[int] = set()
        for index, row in enumerate(frame.rows):
            judged = void(row, VoidReason.ROUND) if row.slot in slots else self._table.judge(row)
            slots.add(row.slot)
            if judged is None:
                fresh.append(index)
            else:
                answers[index] = judged
        if fresh:
            answers.update(zip(fresh, self._verify(frame, fresh), strict=True))
        return tuple(answers[index] for index in range(len(frame.rows)))

    def _verify(self, frame: Round, fresh: Sequence[int]) -> list[Accepted | Void]:
        """Run the frame's `fresh` rows through the half and judge their drafts."""
        counts = [1 + len(row.draft) for row in frame.rows]
        parts = torch.split(self._hidden(frame), counts)
        rows = [frame.rows[index] for index in fresh]
        counts = [counts[index] for index in fresh]
        hidden = pad_rows(torch.cat([parts[index] for index in fresh]), counts)
        output = self._forward(hidden, [row.slot for row in rows], [row.position for row in rows])
        logits = self._shard.logits(pack_rows(output, counts))  # [sum(counts), vocab]
        finite = [bool(part.all()) for part in torch.split(torch.isfinite(logits).all(dim=-1), counts)]
        samplings = [self._sampling(row) for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        positions = [row.position + 1 + i for row, n in zip(rows, counts, strict=True) for i in range(n)]
        choices = pad_rows(self._choose(logits, samplings, positions), counts)  # [rows, K + 1]
        drafts = torch.zeros_like(choices[:, 1:])
        for index, row in enumerate(rows):
            drafts[index, : len(row.draft)] = torch.as_tensor(row.draft, dtype=drafts.dtype)
        lengths = torch.as_tensor(counts, device=choices.device) - 1
        accepted = verify(choices, drafts, lengths)
        following = choices.gather(1, accepted[:, None])[:, 0].tolist()
        return [
            self._table.verified(row, num, token) if is_finite else self._spoil(row)
            for row, num, token, is_finite in zip(rows, accepted.tolist(), following, finite, strict=True)
        ]

    def _spoil(self, row: Prefill | Draft) -> Void:
        # NaN behind a mask still poisons attention, so the slot's cache must not keep any.
        self._shard.zero_slot(row.slot)
        return self._table.spoiled(row)

    def _sampling(self, row: Draft) -> Sampling:
        sampling = self._table[row.slot].sampling
        assert sampling is not None  # `judge` lets no draft row of an unprefilled slot through
        return sampling

    def _choose(self, logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
        device = logits.device
        rows = SamplingRows.from_rows(list(samplings), device)
        return choose(logits, rows, torch.as_tensor(positions, device=device))

    def _forward(self, hidden: torch.Tensor, slots: list[int], starts: list[int]) -> torch.Tensor:
        device = self._shard.device
        return self._shard.forward(
            hidden, torch.as_tensor(slots, device=device), torch.as_tensor(starts, device=device)
        )

    def _hidden(self, frame: Prefill | Round) -> torch.Tensor:
        return from_wire(frame.hidden, dtype=self._shard.dtype, device=self._shard.device)

    def _is_hidden(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[1] == self._shard.hidden_size
