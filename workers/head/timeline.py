"""Where the time of frames goes: to the jobs' figures, to the costs that plans are made from, and to the trace."""

from __future__ import annotations

from dataclasses import dataclass

from workers.head.costs import Costs
from workers.head.courier import Answered
from workers.head.ledger import Spent
from workers.head.prefilling import MadeChunk
from workers.head.rounds import MadeRound
from workers.head.trace import Trace

#: weight of the newest round in the usual draft length
NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class _Sent:
    made: MadeRound | MadeChunk
    #: the head's time for the frame, the sending included
    draft_s: float
    head_s: float


class Timeline:
    """Follows every frame of an epoch from its making to the use of its verdict."""

    def __init__(self, costs: Costs, trace: Trace) -> None:
        self._costs = costs
        self._trace = trace
        self._sent: dict[int, _Sent] = {}
        self._usual_length = 0.0

    @property
    def usual_length(self) -> int:
        """Tokens of the longest draft in a usual round of late."""
        return round(self._usual_length)

    def clear(self) -> None:
        """Frames in flight have no verdict to come."""
        self._sent.clear()

    def sent(self, number: int, lane: int, made: MadeRound | MadeChunk, began: float, ended: float) -> None:
        """Handing over the frame lasted from `began`, when it had just been made, to `ended`."""
        draft_s, head_s = (made.draft_s if isinstance(made, MadeRound) else 0.0), made.head_s + ended - began
        self._sent[number] = _Sent(made, draft_s, head_s)
        if isinstance(made, MadeRound):
            self._usual_length += NEWEST * (made.longest - self._usual_length)
            rows, tokens = len(made.frame.rows), made.num_tokens
            self._trace.span("draft", lane, ended - head_s - draft_s, ended - head_s, rows=rows, effort=made.effort)
            self._trace.span("head", lane, ended - head_s, ended, rows=rows, tokens=tokens)
        else:
            self._trace.span("prefill", lane, ended - head_s, ended, tokens=made.num_tokens)

    def made(self, number: int) -> MadeRound | MadeChunk:
        """What was sent under this number."""
        return self._sent[number].made

    def spent(self, answered: Answered) -> Spent:
        """What each row of an answered frame is charged: its whole times, for all rows wait for them."""
        sent, verdict = self._sent[answered.frame.number], answered.verdict
        num_rows = len(verdict.rows)
        return Spent(
            sent.draft_s,
            sent.head_s,
            answered.link_s,
            verdict.tail_s + verdict.waited_s,
            answered.bytes_up // num_rows,
            answered.bytes_down // num_rows,
        )

    def applied(self, answered: Answered, began: float, ended: float) -> None:
        """A verdict was put to use from `began` to `ended`; rounds teach what the next ones will cost."""
        sent, verdict = self._sent.pop(answered.frame.number), answered.verdict
        made = sent.made
        if isinstance(made, MadeRound) and not answered.resent:
            self._costs.observe_round(
                rows=len(made.frame.rows),
                longest=made.longest,
                tokens=made.num_tokens,
                draft_steps=made.effort,
                draft_s=sent.draft_s,
                head_s=sent.head_s + ended - began,
                link_s=answered.link_s,
                tail_s=verdict.tail_s,
                bytes_up=answered.bytes_up,
                lanes=made.lanes,
            )
        self._draw(answered, began, ended)

    def _draw(self, answered: Answered, began: float, ended: float) -> None:
        verdict, lane = answered.verdict, answered.lane
        self._trace.span(
            "link",
            lane,
            answered.sent_at,
            answered.arrived_at,
            link_s=answered.link_s,
            waited_s=verdict.waited_s,
            bytes_up=answered.bytes_up,
            bytes_down=answered.bytes_down,
        )
        # The tail has another clock: its work is drawn as if both ways took equally long.
        tail_end = answered.arrived_at - answered.link_s / 2
        self._trace.span("tail", lane, tail_end - verdict.tail_s, tail_end, rows=len(verdict.rows))
        self._trace.span("apply", lane, began, ended)
