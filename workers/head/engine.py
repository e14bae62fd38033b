"""The head's half of the work: admit, draft, send, prefill, collect. One thread owns an engine.

`step` is one turn of that loop. The engine knows no Celery and opens no transport: an epoch's link is handed in
by `open`, jobs come in through a `Source`, outcomes go out through a `Report`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

import torch

from relay.messages import Accepted, Prefill, Round, Void, VoidReason
from tasks.figures import HeadFigures
from tasks.generation import FailureType, StopReason
from workers.engine.shard import HeadShard
from workers.errors import OutOfMemory
from workers.head.allowance import Allowance
from workers.head.costs import Costs
from workers.head.courier import Answered, Courier
from workers.head.drafters import Drafter
from workers.head.drafting import Drafting, DraftingApart, DraftingHere, Pending
from workers.head.forward import HeadForward
from workers.head.frameroom import FrameRoom
from workers.head.gauge import HeadGauge
from workers.head.jobs import Job
from workers.head.lanes import Lanes
from workers.head.ledger import Rate
from workers.head.options import EngineOptions
from workers.head.prefilling import ChunkMaker, MadeChunk, together
from workers.head.roster import Report, Roster, Source
from workers.head.rounds import MadeRound, RoundMaker, draft_policy
from workers.head.scheduler import Chunk, Scheduler
from workers.head.slots import NOTHING_HELD, HeadSlot
from workers.head.timeline import Timeline
from workers.head.trace import NoTrace, Trace
from workers.head.uplink import BUDGET_S, Uplink
from workers.memory import free_unused, memory_watched

log = logging.getLogger(__name__)

#: a job whose prefill had to begin anew this often without a commit fails
MAX_RESTARTS = 5
#: how long a turn waits for a verdict or a job; only the checks between turns need it to end at all
WAIT_S = 0.2
#: seconds between handing jobs back to be alone with a suspect and its beginning: their messages must be back in the
#: queue before it may bring the engine down
CLEARED_FOR_S = 0.5


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
        options: EngineOptions,
        trace: Trace | None = None,
    ) -> None:
        self._roster = Roster(source, report, options.head_id, options.ends_at)
        self._options = options
        self._drafting = self._draft_by(drafter, options.drafts_apart_on)
        self._forward = HeadForward(shard, options.wire_dtype, hands_over=options.whole)
        costs = Costs(drafts_apart=options.drafts_apart_on is not None)
        self._policy = draft_policy(options.draft_length, options.max_draft_length, costs)
        self._rounds = RoundMaker(self._forward, self._policy)
        self._chunks = ChunkMaker(self._forward)
        self._scheduler = Scheduler(slots=options.slots, lanes=options.lanes, prefix_reuse=options.prefix_reuse)
        self._allowance = Allowance(options.slots)
        self._lanes = Lanes(options.lanes, fixed=not options.adapt_lanes)
        self._uplink = Uplink(self._forward.bytes_per_token, options.prefill_chunk)
        self._timeline = Timeline(self._policy.costs, trace or NoTrace())
        self._courier: Courier | None = None
        #: of the courier's frames
        self._room = FrameRoom(self._forward.bytes_per_token, None)
        #: whether this turn found something to send: then the next one may, too
        self._active = False
        self._rate = Rate()
        self._gauge = HeadGauge(options.drafter, options.lanes, shard.device)
        self._device = shard.device
        #: token ids of verdicts are below it
        self.vocab_size = shard.vocab_size
        #: (task id, reason) of stops not yet applied
        self._stops: deque[tuple[str, StopReason]] = deque()
        #: `time.perf_counter` before which no job begins
        self._admits_from = 0.0
        #: the texts that somebody follows
        self.shown = self._roster.shown

    def _draft_by(self, drafter: Drafter, apart_on: str | None) -> Drafting:
        return DraftingHere(drafter) if apart_on is None else DraftingApart(drafter, apart_on, self.wake)

    def close(self) -> None:
        """End the drafter's thread, if it has one; the engine steps no more."""
        self._drafting.close()

    def open(self, courier: Courier, slots: int | None = None, *, tail_id: str = "") -> None:
        """Go on over the link of a new epoch: the tail's slots are empty, so live jobs are prefilled again.

        Only the first `slots` slots are used, where the tail has fewer; jobs in others wait for one of these.
        """
        self._courier = courier
        self._room = FrameRoom(self._forward.bytes_per_token, courier.max_frame_bytes)
        self._gauge.opened(tail_id)
        self._drafting.forget()
        self._lanes.open(self._room.most_rows)
        self._timeline.clear()
        self._scheduler.forget_held()
        self._put_back(self._scheduler.share(self._options.slots if slots is None else slots))
        for slot in self._scheduler.live():
            self._scheduler.restart(slot)

    def wake(self) -> None:
        """From any thread: a job has come."""
        if self._courier is not None:
            self._courier.wake()

    def stop(self, task_id: str, reason: StopReason) -> None:
        """From any thread: end this job with the text it has, at the beginning of the next turn.

        A job that is not here, or not yet, is left alone: whoever wants it stopped asks again as long as it is live.
        """
        self._stops.append((task_id, reason))
        self.wake()

    def apply_stops(self) -> None:
        """End the jobs that shall stop, and show the texts that were asked for.

        Called by `step`, and by the engine's thread while there is no link.
        """
        self._roster.show_asked()
        while self._stops:
            task_id, reason = self._stops.popleft()
            self._take_jobs()
            if task_id in self._roster:
                self._withdraw(task_id)
                self._roster.stop(task_id, reason)

    @property
    def wants_jobs(self) -> bool:
        """False while a suspect runs, or is the next to run, and after closing: what comes then is handed back."""
        return not self._scheduler.has_suspect and self._roster.takes

    @property
    def has_closed(self) -> bool:
        """Whether too little time is left for any job, and none is live."""
        return self._roster.has_closed

    def hand_back_waiting(self) -> None:
        """Give up the tasks that have not begun, so that another head may take them."""
        self._take_jobs()
        self._hand_back(self._roster.not_begun())

    def hand_back_all(self) -> None:
        """Give up every task, begun or waiting, so that another head may take it."""
        self._take_jobs()
        self._hand_back(self._roster.all())

    def _hand_back(self, task_ids: list[str]) -> None:
        for task_id in task_ids:
            self._withdraw(task_id)
            self._roster.hand_back(task_id)

    def stats(self) -> EngineStats:
        """Jobs in slots and in line, and tokens/s over the last seconds."""
        waiting = self._scheduler.num_waiting + self._roster.num_coming
        return EngineStats(len(self._scheduler.live()), waiting, self._rate.per_s())

    def figures(self) -> HeadFigures:
        """All that is counted and measured; any thread may ask, one of them every few seconds."""
        stats = self.stats()
        return self._gauge.figures(stats.running, stats.waiting, stats.tokens_per_s)

    @torch.inference_mode()
    def step(self) -> None:
        """One turn. Raises LinkLost when the epoch is over; the jobs stay and wait for `open`."""
        self._active = False
        self.apply_stops()
        self._admit()
        self._advance()
        self._prefill()
        self._collect()
        self._gauge.measure(self._lanes.num_used(self._scheduler.num_rows), self._policy.costs)

    # -- admit ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._take_jobs()
        self._hand_back(self._roster.too_late())
        if cleared := self._scheduler.clear_for_suspect():
            self._hand_back(cleared)
            self._admits_from = time.perf_counter() + CLEARED_FOR_S
        if time.perf_counter() < self._admits_from:
            return
        for slot in self._scheduler.admit(self._allowance.most):
            job = _job(slot)
            self._drafting.begin(slot.index)
            self._policy.begin(slot.index)
            if job.begin(self._options.wire_dtype) and self._roster.began(job):
                self._gauge.began(job.num_prompt)

    def _take_jobs(self) -> None:
        for job in self._roster.take():
            self._scheduler.submit(job)

    # -- draft and send ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Have drafts made for every free lane, as far as rows wait for one; compute and send what is drafted."""
        rows = self._scheduler.num_rows
        self._lanes.adapt(rows, self._timeline.usual_length, self._policy.costs)
        while (share := self._lanes.share(self._scheduler.ready_rows(), rows)) is not None:
            self._ask(*share)
        while (pending := self._drafting.take()) is not None:
            self._send_round(pending)

    def _ask(self, lane: int, slots: list[HeadSlot]) -> None:
        slots.sort(key=lambda slot: slot.index)  # the caches of neighbours are read without copying
        for slot in slots:
            self._scheduler.depart(slot)
        lanes = self._lanes.num_used(self._scheduler.num_rows)
        self._drafting.ask(self._rounds.ask(lane, slots, lanes))

    def _send_round(self, pending: Pending) -> None:
        lane, slots = pending.asked.lane, pending.asked.present
        if not slots:
            self._lanes.answered(lane)
            return
        try:
            with memory_watched(self._device):
                made = self._rounds.make(self._link().next_number(), pending, self._room)
        except OutOfMemory as error:
            self._lanes.answered(lane)
            self._starved(slots, f"the head had no memory for a round of {len(slots)} jobs: {error}")
            return
        self._send(lane, made.frame, made)

    def _send(self, lane: int, frame: Prefill | Round, made: MadeRound | MadeChunk) -> None:
        """Send what was just made."""
        began = time.perf_counter()
        num_bytes = self._link().send(lane, frame)
        ended = time.perf_counter()
        self._uplink.sent(num_bytes, ended)
        self._timeline.sent(frame.number, lane, made, began, ended)
        self._active = True

    # -- prefill ----------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Compute and send a turn's chunks, if there are any: rounds go on in between."""
        most, per_turn = self._options.prefill_chunk, self._options.prefill_per_turn
        if self._scheduler.num_rows:
            if self._uplink.wait_s(time.perf_counter()) > 0:
                return
            most = self._uplink.chunk_tokens()
            per_turn = self._uplink.tokens_in(BUDGET_S, per_turn)
        most, num_tokens, chunks = self._room.chunk(most), 0, list[Chunk]()
        while num_tokens < max(1, per_turn) and (chunk := self._scheduler.next_chunk(most)) is not None:
            if chunks and not together(chunks, chunk):
                self._send_chunks(chunks)
                chunks = []
            chunks.append(chunk)
            num_tokens += chunk.length
        self._send_chunks(chunks)

    def _send_chunks(self, chunks: list[Chunk]) -> None:
        """Compute and send chunks that may run as one; where there is no memory for that, one by one."""
        chunks = [chunk for chunk in chunks if chunk.is_awaited]
        if not chunks:
            return
        try:
            with memory_watched(self._device):
                made = self._chunks.make(self._link().next_number, chunks)
        except OutOfMemory as error:
            if len(chunks) == 1:
                (chunk,) = chunks
                self._starved([chunk.slot], f"the head had no memory for {chunk.length} tokens of the prompt: {error}")
                return
            free_unused(self._device)
            for chunk in chunks:
                self._send_chunks([chunk])
            return
        for chunk, each in zip(chunks, made, strict=True):
            self._send(self._scheduler.prefill_lane(chunk.slot), each.frame, each)

    # -- collect ----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Apply every verdict that is there; with nothing to do, wait for one, or for a job."""
        answered = self._link().receive(0.0 if self._active else self._pause_s())
        while answered is not None:
            self._apply(answered)
            answered = self._link().receive(0.0)

    def _pause_s(self) -> float:
        backlog_s = self._uplink.wait_s(time.perf_counter())
        return min(backlog_s, WAIT_S) if backlog_s > 0 and self._scheduler.num_prefilling else WAIT_S

    def _apply(self, answered: Answered) -> None:
        began = time.perf_counter()
        made, spent = self._timeline.made(answered.frame.number), self._timeline.spent(answered)
        self._gauge.answered(answered, spent, is_round=isinstance(made, MadeRound))
        if not answered.resent:
            self._uplink.measured(answered.bytes_up, answered.link_s)
        if isinstance(answered.frame, Round):
            self._lanes.answered(answered.lane)
        starved: list[HeadSlot] = []
        for index, answer in enumerate(answered.verdict.rows):
            slot = self._scheduler.slots[answer.slot]
            if not slot.awaits(answer.generation, answer.round):
                continue
            slot.answered(answer.round)
            _job(slot).ledger.spend(spent)
            if isinstance(answer, Void):
                if answer.reason is VoidReason.OUT_OF_MEMORY:
                    starved.append(slot)
                else:
                    self._voided(slot, answer.reason)
            elif isinstance(made, MadeRound):
                self._verified(slot, answer, made.confidence[index])
            elif isinstance(answered.frame, Prefill):
                self._prefilled(slot, answer, answered.frame)
        self._starved(starved, f"the tail had no memory for a frame of {made.num_tokens} tokens (numbers: its log)")
        self._timeline.applied(answered, began, time.perf_counter())

    def _prefilled(self, slot: HeadSlot, answer: Accepted, frame: Prefill) -> None:
        slot.hold(frame.position + frame.hidden.shape[0])
        if frame.round == 0:
            _job(slot).count_cached(frame.position)
        if answer.tokens:
            self._commit(slot, answer)

    def _verified(self, slot: HeadSlot, answer: Accepted, confidence: tuple[float, ...]) -> None:
        self._policy.verified(slot.index, confidence, answer.accepted)
        self._commit(slot, answer, len(confidence))

    def _commit(self, slot: HeadSlot, answer: Accepted, num_drafted: int | None = None) -> None:
        """Take a verdict's tokens into the job's text; `num_drafted` is None for prefill's own token."""
        job = _job(slot)
        kept, reason = job.commit(answer.tokens, answer.logprobs)
        if num_drafted is not None:
            job.ledger.count_round(drafted=num_drafted, accepted=answer.accepted, kept=kept)
        self._gauge.committed(kept, num_drafted, answer.accepted)
        slot.hold(len(job.tokens) - 1)
        self._rate.count(kept)
        self._roster.committed(job)
        if reason is not None:
            self._roster.completed(self._vacate(slot))
        else:
            self._scheduler.decode(slot)
            self._roster.progressed(job)

    # -- ends -------------------------------------------------------------------------------------------------

    def _voided(self, slot: HeadSlot, reason: VoidReason) -> None:
        """A row was not applied: prefill the job again, or fail it where that cannot help."""
        job = _job(slot)
        if reason is VoidReason.NON_FINITE:
            self._clear(slot)
            self._fail(slot, FailureType.NON_FINITE, "the model's logits were not finite")
        elif reason is VoidReason.BOUNDS or job.restarts >= MAX_RESTARTS:
            self._fail(slot, FailureType.INTERNAL, f"the tail voided the job's rows: {reason.value}")
        else:
            log.warning("job %s: row voided (%s), prefilling again", job.task_id, reason.value)
            job.restarts += 1
            self._scheduler.restart(slot)

    def _starved(self, slots: list[HeadSlot], message: str) -> None:
        """There was no memory for these rows together: fewer jobs run from now on, and the others wait for them.

        A job for which there was none although it ran alone is tried once more, then it fails.
        """
        slots = [slot for slot in slots if slot.job is not None]
        if not slots:
            return
        free_unused(self._device)
        running = len(self._scheduler.live())
        most = self._allowance.fell_short(running)
        log.warning("%s; at most %d jobs run at once now", message, most)
        # those that have come furthest stay
        slots = sorted(slots, key=lambda slot: -len(_job(slot).tokens))
        stay = max(0, len(slots) - (running - most))
        for slot in slots:
            slot.held = NOTHING_HELD  # the tail has zeroed what it had no memory for
        self._put_back(slots[stay:])
        for slot in slots[:stay]:
            job = _job(slot)
            job.shortages += running == 1
            if job.shortages > 1:
                self._fail(slot, FailureType.OUT_OF_MEMORY, message)
            else:
                self._scheduler.restart(slot)

    def _put_back(self, slots: list[HeadSlot]) -> None:
        """The jobs of these slots go on later, in other ones, from their committed tokens."""
        self._scheduler.put_back([self._vacate(slot) for slot in slots])

    def _fail(self, slot: HeadSlot, failure: FailureType, message: str) -> None:
        task_id = _job(slot).task_id
        self._withdraw(task_id)
        self._roster.fail(task_id, failure, message)

    def _withdraw(self, task_id: str) -> None:
        """Take a task's jobs out of slots and line: it leaves the roster."""
        for slot in self._scheduler.holding(task_id):
            self._vacate(slot)
        self._scheduler.withdraw(task_id)

    def _vacate(self, slot: HeadSlot) -> Job:
        if slot.awaited:  # values that are no numbers would have shown in the answers that nobody will look at now
            self._clear(slot)
        job = self._scheduler.free(slot)
        self._drafting.end(slot.index)
        self._policy.end(slot.index)
        return job

    def _clear(self, slot: HeadSlot) -> None:
        self._forward.zero_slot(slot.index)
        slot.held = NOTHING_HELD

    def _link(self) -> Courier:
        assert self._courier is not None, "an engine steps only with an open link"
        return self._courier


def _job(slot: HeadSlot) -> Job:
    assert slot.job is not None, "a slot with work has a job"
    return slot.job
