"""How much to draft: what a round costs, how likely drafted tokens are, and the plan that pays best. No torch, no I/O.

**Gain.** A row whose i-th drafted token is accepted with probability a_i, given that all before it were, commits

    E(K) = 1 + a_1 + a_1·a_2 + … + a_1·…·a_K        tokens per round on average;

with one a for every i that is (1 - a^(K+1)) / (1 - a) (Leviathan, Kalman, Matias 2023, "Fast inference from
transformers via speculative decoding", arXiv 2211.17192, equation 1).

**Cost.** Both halves compute a round padded to its longest draft M = max K_r, so that for R rows

    draft = draft_s(M, R)                              one forward of the drafter per step
    head  = head_s(R·(1 + M)),   tail = tail_s(R·(1 + M))
    link  = link_s(bytes of the R + ΣK_r tokens sent)  round trip and bytes / bandwidth

where each function is a line a + b·x, fitted to measured rounds while they run.

**Period.** L lanes are in flight and share one head, one tail and one wire. A lane's round cannot take less than
its own way around, and in the long run none can come faster than the busiest of the three lets L of them pass:

    period(K) = max((draft + head + link + tail) / L,  draft + head,  tail,  wire)     seconds per round of a lane

A drafter on a device of its own works beside the head: then max(draft, head) stands in place of draft + head.

A single lane (L = 1) pays for the round trip, so long drafts pay; once lanes hide the link the first term falls
away, and a draft must earn its compute.

**Plan.** The draft lengths, 0 included, that maximise *goodput*, the tokens committed per second
(Liu et al. 2024, "Optimizing speculative decoding for serving large language models using goodput",
arXiv 2406.14066):

    ΣE_r(K_r) / period(K)

For a given M the period depends on the K_r only through ΣK_r, and the likeliest tokens go first: the tokens of all
rows, ordered by their probability of being committed, are taken as long as goodput rises. The best M wins. That is
exact: a row's probabilities fall with depth, so the order never takes a token before the one in front of it, and
the quotient of a concave gain and a convex cost has no second peak.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from workers.head.acceptance import MOST_SURE, Acceptance, Calibration
from workers.head.costs import Costs

#: the longest draft that `draft_length = "auto"` considers unless told otherwise
MAX_DRAFT = 16
#: drafts are this long at most, in turn, until rounds of two sizes were measured
START_LENGTHS = (4, 1)
#: a draft is cut where the probability that all of it up to there is right falls below this
LEAST_CHANCE = 0.02
#: no round takes less: before anything was measured, the most tokens win
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class RowState:
    """What a plan needs to know of a row: for each token it may draft, the probability that it is committed.

    `chances` never rise; their number is the row's limit.
    """

    chances: tuple[float, ...]

    @classmethod
    def alike(cls, acceptance: float, limit: int) -> RowState:
        """Each of `limit` tokens is accepted with probability `acceptance` if those before it were."""
        return cls(tuple(acceptance**depth for depth in range(1, limit + 1)))

    @classmethod
    def given(cls, conditional: Sequence[float]) -> RowState:
        """Token i is accepted with probability `conditional[i]` if those before it were."""
        return cls(tuple(accumulate(conditional, mul)))


def period_s(rows: int, longest: int, tokens: int, costs: Costs, *, lanes: int = 1, drafted: bool = False) -> float:
    """Seconds per round of a lane, see the module's text; `tokens` are those sent, base tokens included."""
    positions, num_bytes = rows * (1 + longest), costs.bytes_up(tokens)
    head, draft = costs.head_s(positions), 0.0 if drafted else costs.draft_s(longest, rows)
    tail = costs.tail_s(positions)
    around = draft + head + costs.link_s(num_bytes) + tail
    return max(around / lanes, costs.busy_s(draft, head), tail, costs.wire_s(num_bytes), _SHORTEST_S)


def goodput(
    lengths: Sequence[int], rows: Sequence[RowState], costs: Costs, *, lanes: int = 1, drafted: bool = False
) -> float:
    """Expected tokens per second of a lane whose rows draft so much; what `plan` maximises."""
    gain = len(rows) + sum(sum(row.chances[:length]) for row, length in zip(rows, lengths, strict=True))
    seconds = period_s(
        len(rows), max(lengths, default=0), len(rows) + sum(lengths), costs, lanes=lanes, drafted=drafted
    )
    return gain / seconds


def plan(rows: Sequence[RowState], costs: Costs, *, lanes: int = 1, drafted: bool = False) -> list[int]:
    """Draft lengths, one per row and at most its limit, with the highest goodput; of equal ones the shortest.

    Args:
        rows: the rows of one lane's next round.
        costs: as measured so far.
        lanes: rounds in flight at the same time, this one included; the others are taken to be like it.
        drafted: the drafts are there already, and the question is how much of them to send.
    """
    most = max((len(row.chances) for row in rows), default=0)
    # Likeliest first; Python's sort is stable, so equally likely tokens go by row and depth.
    tokens = sorted(
        ((chance, index, depth) for index, row in enumerate(rows) for depth, chance in enumerate(row.chances, 1)),
        key=lambda token: -token[0],
    )
    best = [0] * len(rows)
    best_goodput = goodput(best, rows, costs, lanes=lanes, drafted=drafted)
    gain = float(len(rows))
    for longest in range(1, most + 1):
        gain += sum(row.chances[longest - 1] for row in rows if len(row.chances) >= longest)
        cheapest = period_s(len(rows), longest, len(rows), costs, lanes=lanes, drafted=drafted)
        if gain / cheapest > best_goodput:  # else not even if all the tokens travelled for nothing
            lengths, found = _best_of(tokens, longest, rows, costs, lanes, drafted)
            if found > best_goodput:
                best, best_goodput = lengths, found
    return best


def _best_of(
    tokens: Sequence[tuple[float, int, int]],
    longest: int,
    rows: Sequence[RowState],
    costs: Costs,
    lanes: int,
    drafted: bool,
) -> tuple[list[int], float]:
    """The best lengths up to `longest`, given that the round is padded to it, and their goodput."""
    count = len(rows)
    mine = [(chance, index) for chance, index, depth in tokens if depth <= longest]
    gains = list(accumulate((chance for chance, _ in mine), initial=float(count)))

    def at(num: int) -> float:
        return gains[num] / period_s(count, longest, count + num, costs, lanes=lanes, drafted=drafted)

    num = bisect_left(range(len(mine)), True, key=lambda num: at(num + 1) <= at(num))
    lengths = [0] * count
    for _, index in mine[:num]:
        lengths[index] += 1
    return lengths, at(num)


def worth_sending(confidence: Sequence[float], threshold: float = LEAST_CHANCE) -> int:
    """How many of a draft's tokens to send: up to where the product of their confidences falls below `threshold`."""
    chances = accumulate(confidence, mul)
    return next((num for num, chance in enumerate(chances) if chance < threshold), len(confidence))


@dataclass(slots=True)
class _Row:
    """What is known of the generation in a slot."""

    acceptance: Acceptance
    #: accepted tokens, and how many the calibrated confidences had promised: whether this row does better
    kept: float = 0.0
    promised: float = 0.0


@dataclass(slots=True)
class _Probe:
    """When to draft although it does not seem to pay: acceptance is not seen otherwise."""

    interval: int
    idle: int = 0


class Planner:
    """The adaptive draft lengths of one engine (`draft_length = "auto"`). Learns from every verdict.

    A lane's round asks twice: `effort` before drafting, for drafters whose steps cost, then `select` with what was
    drafted and how sure the drafter is of it. Rounds without drafts for long are broken by a short probe, ever more
    rarely while it changes nothing: the whole lane probes at once, for the halves compute padded rows anyway.
    """

    #: tokens of trust in the confidences' own promise
    ROW_WEIGHT = 8.0
    ROW_FADE = 0.97
    #: rounds without a draft before a probe: at first, and at most
    FIRST_PROBE, LAST_PROBE = 16, 256

    def __init__(self, max_draft: int = MAX_DRAFT, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self._max_draft = max_draft
        self._batch = Acceptance(memory=512.0)
        self._calibration = Calibration()
        self._rows: dict[int, _Row] = {}
        self._probe = _Probe(self.FIRST_PROBE)

    def begin(self, slot: int) -> None:
        """A new job in the slot: only the batch is known of it."""
        self._rows[slot] = _Row(Acceptance(self._batch))

    def end(self, slot: int) -> None:
        """Forget the slot's job."""
        self._rows.pop(slot, None)

    def limit(self, remaining: int) -> int:
        """Most tokens to draft for a row that may still commit `remaining`: the verdict itself adds one."""
        most = self._max_draft
        if not self.costs.known:
            most = min(most, START_LENGTHS[self.costs.num_rounds % len(START_LENGTHS)])
        return max(0, min(most, remaining - 1))

    def effort(self, slots: Sequence[int], limits: Sequence[int], lanes: int = 1) -> list[int]:
        """Tokens worth a costly drafter's steps, for each slot of a lane's next round; at most its limit."""
        if not self.costs.known:
            return list(limits)
        if self._probe.idle >= self._probe.interval:
            return [min(1, limit) for limit in limits]
        rows = [
            RowState.given(self._rows[slot].acceptance.conditional(limit))
            for slot, limit in zip(slots, limits, strict=True)
        ]
        return plan(rows, self.costs, lanes=lanes)

    def select(self, slots: Sequence[int], confidence: Sequence[Sequence[float]], lanes: int = 1) -> list[int]:
        """How many tokens of each slot's draft to send, given how sure the drafter is of each of them."""
        if not self.costs.known:
            return [worth_sending(sure) for sure in confidence]
        if self._probe.idle >= self._probe.interval:
            if any(confidence):
                self._probe = _Probe(min(2 * self._probe.interval, self.LAST_PROBE))
            return [min(1, len(sure)) for sure in confidence]
        promised = [self._promise(slot, sure) for slot, sure in zip(slots, confidence, strict=True)]
        rows = [RowState.given(chances[: worth_sending(chances)]) for chances in promised]
        lengths = plan(rows, self.costs, lanes=lanes, drafted=True)
        self._probe = _Probe(self.FIRST_PROBE) if any(lengths) else _Probe(self._probe.interval, self._probe.idle + 1)
        return lengths

    def verified(self, slot: int, confidence: Sequence[float], accepted: int) -> None:
        """The tail accepted the first `accepted` of the tokens sent, of which the drafter was so sure."""
        row = self._rows.get(slot)
        self._batch.observe(len(confidence), accepted)
        if row is not None:
            row.acceptance.observe(len(confidence), accepted)
            row.kept = row.kept * self.ROW_FADE + accepted
            row.promised = row.promised * self.ROW_FADE + sum(
                self._calibration.probability(sure) for sure in confidence[: accepted + 1]
            )
        self._calibration.observe(confidence, accepted)

    def _promise(self, slot: int, confidence: Sequence[float]) -> list[float]:
        row = self._rows[slot]
        better = (self.ROW_WEIGHT + row.kept) / (self.ROW_WEIGHT + row.promised)
        return [min(MOST_SURE, better * self._calibration.probability(sure)) for sure in confidence]
