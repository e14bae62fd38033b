"""The head's half of the work: admit, prefill, draft, send, collect. One thread owns an engine.

`step` is one turn of that loop. The engine knows no Celery and opens no transport: an epoch's link is handed in
by `open`, jobs come in through a `Source`, outcomes go out through a `Report`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from relay.messages import Accepted, Draft, Prefill, Round, Void, VoidReason
from tasks.generation import FailureType, FinishReason, Outcome
from workers.engine.shard import HeadShard
from workers.engine.tensors import pack_rows, to_wire
from workers.head.courier import Answered, Courier
from workers.head.drafters import Drafter, DraftRow
from workers.head.jobs import Job
from workers.head.ledger import Spent
from workers.head.scheduler import Chunk, HeadSlot, Phase, Scheduler

log = logging.getLogger(__name__)

#: prefill chunks in flight at once; below the tail's stored answers and the streams' MAXLEN
PREFILL_CREDIT = 8
#: a job whose prefill had to begin anew this often without a commit fails
MAX_RESTARTS = 5
#: how long a turn with nothing to compute waits for a verdict or a new job
IDLE_S = 0.02
#: least time between two progress reports of a job
PROGRESS_EVERY_S = 2.0
#: interval over which the engine's tokens/s are averaged
RATE_WINDOW_S = 5.0


class Report(Protocol):
    """Where an engine tells what became of jobs. Calls come from the engine's thread and must not block."""

    def started(self, task_id: str) -> None: ...

    def progress(self, task_id: str, num_tokens: int, tps: float | None) -> None: ...

    def finish(self, task_id: str, outcome: Outcome) -> None: ...

    def hand_back(self, task_id: str) -> None: ...


class Source(Protocol):
    """Where an engine takes its jobs from; see `workers.head.intake.Intake`."""

    def take(self) -> Job | Outcome | None: ...

    @property
    def num_waiting(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A glance at an engine; any thread may ask."""

    running: int
    waiting: int
    tokens_per_s: float


class HeadEngine:
    """Continuous batching over the slots of the head's half."""

    def __init__(
        self,
        shard: HeadShard,
        drafter: Drafter,
        source: Source,
        report: Report,
        *,
        head_id: str,
        slots: int,
        draft_length: int,
        lanes: int,
        prefill_chunk: int,
        wire_dtype: str,
    ) -> None:
        self._shard = shard
        self._drafter = drafter
        self._report = report
        self._head_id = head_id
        self._draft_length = draft_length
        self._wire_dtype = wire_dtype
        self._source = source
        self._scheduler = Scheduler(
            slots=slots, lanes=lanes, prefill_chunk=prefill_chunk, prefill_credit=PREFILL_CREDIT
        )
        self._courier: Courier | None = None
        self._compute_s: dict[int, tuple[float, float]] = {}  # frame number -> seconds (draft, head)
        self._reported: dict[str, float] = {}
        self._commits: deque[tuple[float, int]] = deque()

    def open(self, courier: Courier) -> None:
        """Go on over the link of a new epoch: the tail's slots are empty, so live jobs are prefilled again."""
        self._courier = courier
        self._compute_s.clear()
        for slot in self._scheduler.live():
            self._scheduler.restart(slot)

    def hand_back_all(self) -> None:
        """Give up every job, running or waiting, so that another head may take it."""
        self._take_jobs()
        for job in self._scheduler.drop_waiting():
            self._report.hand_back(job.task_id)
        for slot in self._scheduler.live():
            self._report.hand_back(self._vacate(slot).task_id)

    def stats(self) -> EngineStats:
        """Jobs in slots and in line, and tokens/s over the last seconds."""
        since = time.perf_counter() - RATE_WINDOW_S
        recent = sum(count for at, count in tuple(self._commits) if at >= since)
        waiting = self._scheduler.num_waiting + self._source.num_waiting
        return EngineStats(len(self._scheduler.live()), waiting, recent / RATE_WINDOW_S)

    @torch.inference_mode()
    def step(self) -> None:
        """One turn. Raises LinkLost when the epoch is over; the jobs stay and wait for `open`."""
        self._admit()
        self._prefill()
        for lane in range(self._scheduler.num_lanes):
            self._advance(lane)
        self._collect()

    # -- admit ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._take_jobs()
        for slot in self._scheduler.admit():
            job = _job(slot)
            job.ledger.start()
            self._drafter.begin(slot.index)
            self._report.started(job.task_id)

    def _take_jobs(self) -> None:
        while (arrived := self._source.take()) is not None:
            if isinstance(arrived, Job):
                self._scheduler.submit(arrived)
            else:
                self._report.finish(f"{arrived.job}.{arrived.attempt}", arrived)

    # -- prefill ----------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Compute and send one chunk, if there is one: decoding rounds go on in between."""
        chunk = self._scheduler.next_chunk()
        if chunk is not None:
            self._send_chunk(chunk)

    def _send_chunk(self, chunk: Chunk) -> None:
        slot, job = chunk.slot, _job(chunk.slot)
        started = time.perf_counter()
        tokens = job.tokens[chunk.start : chunk.start + chunk.length]
        hidden = self._forward([tokens], [slot.index], [chunk.start])
        head_s = time.perf_counter() - started
        frame = Prefill(
            number=self._link().next_number(),
            slot=slot.index,
            generation=slot.generation,
            round=slot.next_round(),
            position=chunk.start,
            token=tokens[-1],
            last=chunk.last,
            sampling=job.sampling,
            copy=None,
            hidden=to_wire(hidden[0], self._wire_dtype),
        )
        self._compute_s[frame.number] = (0.0, head_s)
        self._link().send(slot.lane, frame)

    # -- draft and send ---------------------------------------------------------------------------------------

    def _advance(self, lane: int) -> None:
        """Draft, compute and send a round of the lane, unless one is in flight."""
        slots = self._scheduler.ready_rows(lane)
        if not slots:
            return
        started = time.perf_counter()
        drafts = self._draft(slots)
        drafted = time.perf_counter()
        fed = [[_job(slot).tokens[-1], *draft] for slot, draft in zip(slots, drafts, strict=True)]
        starts = [len(_job(slot).tokens) - 1 for slot in slots]
        hidden = pack_rows(self._forward(fed, [slot.index for slot in slots], starts), [len(tokens) for tokens in fed])
        wire = to_wire(hidden, self._wire_dtype)
        done = time.perf_counter()
        rows = tuple(
            Draft(slot.index, slot.generation, slot.next_round(), start, tokens[0], tuple(tokens[1:]))
            for slot, start, tokens in zip(slots, starts, fed, strict=True)
        )
        frame = Round(self._link().next_number(), rows, wire)
        self._compute_s[frame.number] = (drafted - started, done - drafted)
        self._link().send(lane, frame)

    def _draft(self, slots: Sequence[HeadSlot]) -> list[tuple[int, ...]]:
        rows = []
        for slot in slots:
            job = _job(slot)
            # The verdict adds one token to what it accepts: more drafts than this could never be used.
            limit = min(self._draft_length, job.num_remaining - 1)
            rows.append(DraftRow(slot.index, job.tokens, job.sampling, limit))
        return [proposal.tokens for proposal in self._drafter.propose(rows)]

    def _forward(self, fed: Sequence[Sequence[int]], slots: list[int], starts: list[int]) -> torch.Tensor:
        """[rows, query, hidden] of ragged rows of tokens; behind a row's own tokens the output means nothing."""
        device = self._shard.device
        query = max(len(tokens) for tokens in fed)
        padded = [[*tokens, *[0] * (query - len(tokens))] for tokens in fed]
        return self._shard.forward(
            torch.as_tensor(padded, device=device),
            torch.as_tensor(slots, device=device),
            torch.as_tensor(starts, device=device),
        )

    # -- collect ----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Apply every verdict that is there; wait a moment for one when there is nothing else to do."""
        if self._scheduler.num_unanswered == 0:
            if self._source.num_waiting == 0 and not self._scheduler.live():
                self._link().receive(IDLE_S)
            return
        answered = self._link().receive(0.0 if self._scheduler.has_chunks else IDLE_S)
        while answered is not None:
            self._apply(answered)
            answered = self._link().receive(0.0)

    def _apply(self, answered: Answered) -> None:
        num_rows = len(answered.verdict.rows)
        draft_s, head_s = self._compute_s.pop(answered.frame.number, (0.0, 0.0))
        spent = Spent(
            draft_s,
            head_s,
            answered.link_s,
            answered.verdict.tail_s,
            answered.bytes_up // num_rows,
            answered.bytes_down // num_rows,
        )
        sent = answered.frame.rows if isinstance(answered.frame, Round) else (None,) * num_rows
        for answer, row in zip(answered.verdict.rows, sent, strict=True):
            slot = self._scheduler.slots[answer.slot]
            if not slot.awaits(answer.generation, answer.round):
                continue
            slot.awaited.discard(answer.round)
            _job(slot).ledger.spend(spent)
            if isinstance(answer, Void):
                self._voided(slot, answer.reason)
            elif answer.tokens:
                self._commit(slot, answer, None if row is None else len(row.draft))

    def _commit(self, slot: HeadSlot, answer: Accepted, num_drafted: int | None) -> None:
        """Take a verdict's tokens into the job's text; `num_drafted` is None for prefill's own token."""
        job = _job(slot)
        kept, reason = job.commit(answer.tokens)
        if num_drafted is not None:
            job.ledger.count_round(drafted=num_drafted, accepted=answer.accepted, kept=kept)
        self._commits.append((time.perf_counter(), kept))
        while len(self._commits) > 1 and self._commits[0][0] < self._commits[-1][0] - RATE_WINDOW_S:
            self._commits.popleft()
        slot.phase = Phase.DECODE
        if reason is not None:
            self._finish(slot, reason)
        else:
            self._progress(job)

    def _progress(self, job: Job) -> None:
        now = time.perf_counter()
        if now - self._reported.get(job.task_id, 0.0) >= PROGRESS_EVERY_S:
            self._reported[job.task_id] = now
            self._report.progress(job.task_id, job.ledger.num_tokens, job.ledger.decode_tps())

    # -- ends -------------------------------------------------------------------------------------------------

    def _finish(self, slot: HeadSlot, reason: FinishReason) -> None:
        job = self._vacate(slot)
        self._report.finish(job.task_id, job.completed(self._head_id, reason))

    def _voided(self, slot: HeadSlot, reason: VoidReason) -> None:
        """A row was not applied: prefill the job again, or fail it where that cannot help."""
        job = _job(slot)
        if reason is VoidReason.NON_FINITE:
            self._shard.zero_slot(slot.index)
            self._fail(slot, FailureType.NON_FINITE, "the model's logits were not finite")
        elif reason is VoidReason.BOUNDS or job.restarts >= MAX_RESTARTS:
            self._fail(slot, FailureType.INTERNAL, f"the tail voided the job's rows: {reason.value}")
        else:
            log.warning("job %s: row voided (%s), prefilling again", job.task_id, reason.value)
            job.restarts += 1
            self._scheduler.restart(slot)

    def _fail(self, slot: HeadSlot, failure: FailureType, message: str) -> None:
        job = self._vacate(slot)
        self._report.finish(job.task_id, job.failed(self._head_id, failure, message))

    def _vacate(self, slot: HeadSlot) -> Job:
        job = self._scheduler.free(slot)
        self._drafter.end(slot.index)
        self._reported.pop(job.task_id, None)
        return job

    def _link(self) -> Courier:
        assert self._courier is not None, "an engine steps only with an open link"
        return self._courier


def _job(slot: HeadSlot) -> Job:
    assert slot.job is not None, "a slot with work has a job"
    return slot.job
