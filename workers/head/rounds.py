"""Making a round: how much to draft, the drafts, the head's forward, the frame."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from relay.messages import Draft, Round
from workers.head.costs import Costs
from workers.head.drafters import DraftRow, Proposal
from workers.head.drafting import Asked, Pending
from workers.head.forward import HeadForward
from workers.head.frameroom import FrameRoom
from workers.head.jobs import Job
from workers.head.slots import HeadSlot
from workers.head.speculation import Planner


class DraftPolicy(Protocol):
    """How long drafts are; see `workers.head.speculation.Planner`."""

    costs: Costs

    def begin(self, slot: int) -> None: ...

    def end(self, slot: int) -> None: ...

    def limit(self, remaining: int) -> int: ...

    def effort(self, slots: Sequence[int], limits: Sequence[int], lanes: int = 1) -> list[int]: ...

    def select(self, slots: Sequence[int], confidence: Sequence[Sequence[float]], lanes: int = 1) -> list[int]: ...

    def verified(self, slot: int, confidence: Sequence[float], accepted: int) -> None: ...


class FixedLength:
    """Always the same draft length."""

    def __init__(self, length: int, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self._length = length

    def begin(self, slot: int) -> None: ...

    def end(self, slot: int) -> None: ...

    def limit(self, remaining: int) -> int:
        """The verdict adds one token to what it accepts: more drafts than this could never be used."""
        return max(0, min(self._length, remaining - 1))

    def effort(self, slots: Sequence[int], limits: Sequence[int], lanes: int = 1) -> list[int]:
        return list(limits)

    def select(self, slots: Sequence[int], confidence: Sequence[Sequence[float]], lanes: int = 1) -> list[int]:
        return [len(sure) for sure in confidence]

    def verified(self, slot: int, confidence: Sequence[float], accepted: int) -> None: ...


def draft_policy(length: int | Literal["auto"], most: int, costs: Costs | None = None) -> DraftPolicy:
    """The policy for the setting `draft_length`."""
    return Planner(most, costs) if length == "auto" else FixedLength(length, costs)


@dataclass(frozen=True, slots=True)
class MadeRound:
    """A round ready to be sent, and what it took to make it."""

    frame: Round
    #: the drafter's word on every token sent, by row
    confidence: tuple[tuple[float, ...], ...]
    #: most steps that the drafter was asked for
    effort: int
    #: rounds in flight at the same time
    lanes: int
    draft_s: float
    head_s: float

    @property
    def longest(self) -> int:
        """Tokens of the longest draft."""
        return max(len(row.draft) for row in self.frame.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens sent, base tokens included."""
        return sum(1 + len(row.draft) for row in self.frame.rows)


class RoundMaker:
    """Makes the rounds of one engine: `ask` says what to draft, `make` computes and packs what was drafted."""

    def __init__(self, forward: HeadForward, policy: DraftPolicy) -> None:
        self._forward = forward
        self._policy = policy

    def ask(self, lane: int, slots: Sequence[HeadSlot], lanes: int) -> Asked:
        """What the slots' rows want of the drafter; `lanes` rounds will be in flight at once, this one included."""
        jobs, indexes = [_job(slot) for slot in slots], [slot.index for slot in slots]
        limits = [self._policy.limit(job.num_remaining) for job in jobs]
        efforts = self._policy.effort(indexes, limits, lanes)
        rows = tuple(
            DraftRow(index, job.tokens, job.sampling, limit, effort, job.num_prompt)
            for index, job, limit, effort in zip(indexes, jobs, limits, efforts, strict=True)
        )
        return Asked(lane, tuple(slots), tuple(slot.generation for slot in slots), rows, lanes)

    def make(self, number: int, pending: Pending, room: FrameRoom) -> MadeRound:
        """The round of the rows that still want their drafts, of which there is at least one; it keeps to `room`."""
        asked, (proposals, draft_s) = pending.asked, pending.drafted()
        started = time.perf_counter()
        slots = asked.present
        jobs = [_job(slot) for slot in slots]
        drafts = self._select(slots, [proposals[place] for place in asked.places], asked.lanes, room)
        fed = [[job.tokens[-1], *tokens] for job, (tokens, _) in zip(jobs, drafts, strict=True)]
        starts = [len(job.tokens) - 1 for job in jobs]
        hidden = self._forward.run(fed, [slot.index for slot in slots], starts)
        rows = tuple(
            Draft(slot.index, slot.generation, slot.next_round(), start, tokens[0], tuple(tokens[1:]))
            for slot, start, tokens in zip(slots, starts, fed, strict=True)
        )
        frame, confidence = Round(number, rows, hidden), tuple(sure for _, sure in drafts)
        effort = max(row.effort or 0 for row in asked.rows)
        return MadeRound(frame, confidence, effort, asked.lanes, draft_s, time.perf_counter() - started)

    def _select(
        self, slots: Sequence[HeadSlot], proposals: Sequence[Proposal], lanes: int, room: FrameRoom
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Every row's draft as far as it is worth sending and has room, with the drafter's confidences."""
        indexes = [slot.index for slot in slots]
        worth = self._policy.select(indexes, [proposal.confidence for proposal in proposals], lanes)
        kept = room.shorten(worth, [_job(slot).sampling.logprobs for slot in slots])
        return [(p.tokens[:length], p.confidence[:length]) for p, length in zip(proposals, kept, strict=True)]


def _job(slot: HeadSlot) -> Job:
    assert slot.job is not None, "a row in a round has a job"
    return slot.job
