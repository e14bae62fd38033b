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

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median

#: the longest draft that `draft_length = "auto"` considers unless told otherwise
MAX_DRAFT = 16
#: drafts are this long at most, in turn, until rounds of two sizes were measured
START_LENGTHS = (4, 1)
#: acceptance of a drafter nothing is known of
START_ACCEPTANCE = 0.6
#: no draft token counts as surer than this
MOST_SURE = 0.995
#: a draft is cut where the probability that all of it up to there is right falls below this
LEAST_CHANCE = 0.02
#: no round takes less: before anything was measured, the most tokens win
_SHORTEST_S = 1e-9


class LinearCost:
    """A cost y = a + b·x, a and b not negative, fitted to what was measured lately.

    Measurements are kept in classes of similar x. Of each the median of the last few counts, so an outlier (a page
    fault, a stall) moves nothing, and a size that is rarely used is not forgotten: the slope needs both ends.
    While a single size is known, all of its cost counts as `a`: more is thought free until it was tried.
    """

    #: measurements remembered of a size class
    WINDOW = 9
    #: measurements after which a class's median can be trusted
    ENOUGH = 3
    #: size classes remembered, the one unused for longest goes first
    MOST_CLASSES = 16
    #: measurements after which a class that got none counts half
    HALF_LIFE = 256

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[float, float]]] = {}
        self._last_used: dict[int, int] = {}
        self._count = 0
        self._fit: tuple[float, float] | None = (0.0, 0.0)

    def observe(self, x: float, y: float) -> None:
        """Take in one measurement."""
        key = round(4 * math.log2(1.0 + x))
        if key not in self._classes and len(self._classes) == self.MOST_CLASSES:
            oldest = min(self._last_used, key=self._last_used.__getitem__)
            del self._classes[oldest], self._last_used[oldest]
        self._classes.setdefault(key, deque(maxlen=self.WINDOW)).append((x, y))
        self._count += 1
        self._last_used[key] = self._count
        self._fit = None

    @property
    def num_sizes(self) -> int:
        """How many different sizes were measured often enough."""
        return sum(len(samples) >= self.ENOUGH for samples in self._classes.values())

    @property
    def is_empty(self) -> bool:
        """Nothing was measured yet."""
        return not self._classes

    @property
    def slope(self) -> float:
        """Cost of one more x."""
        return self._line()[1]

    def __call__(self, x: float) -> float:
        """The expected cost of x; 0 before the first measurement."""
        intercept, slope = self._line()
        return intercept + slope * x

    def _line(self) -> tuple[float, float]:
        if self._fit is None:
            # A class of one or two may be an outlier alone.
            known = [key for key, samples in self._classes.items() if len(samples) >= self.ENOUGH]
            self._fit = _fit([self._summary(key) for key in known or self._classes])
        return self._fit

    def _summary(self, key: int) -> tuple[float, float, float]:
        """(x, y, weight) that stand for a class."""
        samples = self._classes[key]
        age = self._count - self._last_used[key]
        weight = len(samples) * 0.5 ** (age / self.HALF_LIFE)
        return median(x for x, _ in samples), median(y for _, y in samples), weight


def _fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Weighted least squares of y = a + b·x with a, b >= 0 over (x, y, weight)."""
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread if spread > 0 else 0.0
    if slope <= 0:
        return mean_y, 0.0
    intercept = mean_y - slope * mean_x
    if intercept >= 0:
        return intercept, slope
    return 0.0, sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)


class Costs:
    """Running costs of a head's rounds. Seconds and bytes."""

    #: a link's frames cross two wires, one after another (head to relay, relay to tail): either is busy for at
    #: least this part of the time that a byte is on its way
    BUSY_PART_OF_LINK = 0.5
    #: where the lanes' compute fills this part of a round's way around, frames are taken to wait in line for it
    SATURATED = 0.75

    def __init__(self) -> None:
        self._draft_step = LinearCost()
        self._head = LinearCost()
        self._tail = LinearCost()
        self._link = LinearCost()
        self._bytes_up = LinearCost()
        #: latest link times as they came
        self._around: deque[float] = deque(maxlen=LinearCost.WINDOW)
        #: rounds taken in
        self.num_rounds = 0

    def observe_round(
        self,
        *,
        rows: int,
        longest: int,
        tokens: int,
        draft_steps: int,
        draft_s: float,
        head_s: float,
        link_s: float,
        tail_s: float,
        bytes_up: int,
        lanes: int = 1,
    ) -> None:
        """Take in one answered round (not prefill: its shape costs otherwise).

        Args:
            rows: of the round.
            longest: tokens of its longest draft as sent; both halves computed `rows * (1 + longest)` positions.
            tokens: sent, base tokens included.
            draft_steps: most `effort` that the drafter was asked for; 0 if it was not asked.
            draft_s: the drafter's time.
            head_s: everything else the head's thread did for the round.
            link_s: from sending to the verdict's arrival, less `tail_s`.
            tail_s: the tail's work.
            bytes_up: size of the frame.
            lanes: rounds in flight at the same time.
        """
        positions = rows * (1 + longest)
        if draft_steps:
            self._draft_step.observe(rows, draft_s / draft_steps)
        self._head.observe(positions, head_s)
        self._tail.observe(positions, tail_s)
        self._bytes_up.observe(tokens, bytes_up)
        self._around.append(link_s)
        if not self._waits_in_line(rows, longest, draft_steps, lanes) or link_s < self._link(bytes_up):
            self._link.observe(bytes_up, link_s)
        self.num_rounds += 1

    def _waits_in_line(self, rows: int, longest: int, draft_steps: int, lanes: int) -> bool:
        """Whether frames wait for those in front of them, so that their link times do not tell of the link.

        By Little's law a round in a saturated pipeline takes lanes x busiest part. Counted as link, the wait would
        make more compute look free.
        """
        if lanes == 1 or self._link.is_empty:
            return False
        head = self.head_s(rows * (1 + longest)) + self.draft_s(draft_steps, rows)
        tail = self.tail_s(rows * (1 + longest))
        return lanes * max(head, tail) >= self.SATURATED * (head + median(self._around) + tail)

    @property
    def known(self) -> bool:
        """Whether rounds of more than one size were measured well enough: before, slopes are guesses."""
        return self._head.num_sizes > 1 and self._tail.num_sizes > 1

    def draft_s(self, steps: int, rows: int) -> float:
        """The drafter's time for `steps` tokens of each of `rows`."""
        return steps * self._draft_step(rows) if steps else 0.0

    def head_s(self, positions: int) -> float:
        """The head's time for so many positions, padding included."""
        return self._head(positions)

    def tail_s(self, positions: int) -> float:
        """The tail's time for so many positions, padding included."""
        return self._tail(positions)

    def bytes_up(self, tokens: int) -> float:
        """Size of a frame of so many tokens."""
        return self._bytes_up(tokens)

    def link_s(self, num_bytes: float) -> float:
        """Round trip of a frame of this size and its verdict."""
        return self._link(num_bytes)

    def wire_s(self, num_bytes: float) -> float:
        """How long a frame of this size keeps the busiest wire from the next one."""
        return self._link.slope * num_bytes * self.BUSY_PART_OF_LINK


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
    head = costs.head_s(positions) + (0.0 if drafted else costs.draft_s(longest, rows))
    tail = costs.tail_s(positions)
    return max((head + costs.link_s(num_bytes) + tail) / lanes, head, tail, costs.wire_s(num_bytes), _SHORTEST_S)


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


def _hopeful(rate: float, tries: float) -> float:
    """A rate plus its standard error: what was tried little is tried more, or bad luck would have the last word."""
    return rate + math.sqrt(rate * (1.0 - rate) / tries)


class Acceptance:
    """How often drafted tokens are accepted, by depth: a running estimate of which old rounds fade out.

    Depth matters: where a drafter found the right place its whole draft tends to be right. With little seen at a
    depth the estimate leans on the row's overall rate, and with little seen of the row on the batch (`prior`).
    """

    #: tokens' worth of trust in the prior
    PRIOR_WEIGHT = 4.0

    def __init__(self, prior: Acceptance | None = None, *, memory: float = 32.0) -> None:
        """`memory`: rounds over which a round's weight falls to 1/e."""
        self._prior = prior
        self._fade = math.exp(-1.0 / memory)
        self._tested: list[float] = []
        self._accepted: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """A round sent `drafted` tokens, of which the first `accepted` were right."""
        if not drafted:
            return
        tested = min(accepted + 1, drafted)
        self._tested = [count * self._fade for count in self._tested]
        self._accepted = [count * self._fade for count in self._accepted]
        missing = tested - len(self._tested)
        self._tested += [0.0] * missing
        self._accepted += [0.0] * missing
        for depth in range(tested):
            self._tested[depth] += 1.0
        for depth in range(accepted):
            self._accepted[depth] += 1.0

    @property
    def rate(self) -> float:
        """Probability that a token is accepted if those before it were, whatever the depth."""
        prior = START_ACCEPTANCE if self._prior is None else self._prior.rate
        weight = self.PRIOR_WEIGHT
        return (weight * prior + sum(self._accepted)) / (weight + sum(self._tested))

    def conditional(self, limit: int) -> list[float]:
        """The same for each of the first `limit` depths, on the hopeful side."""
        rate, weight = self.rate, self.PRIOR_WEIGHT
        if self._prior is None:
            leaning = [_hopeful(rate, weight + sum(self._tested))] * limit
        else:
            better = rate / max(self._prior.rate, 1e-6)
            leaning = [chance * better for chance in self._prior.conditional(limit)]
        tested = self._tested[:limit] + [0.0] * (limit - len(self._tested))
        accepted = self._accepted[:limit] + [0.0] * (limit - len(self._accepted))
        return [
            min(MOST_SURE, (weight * lean + hits) / (weight + tries))
            for lean, hits, tries in zip(leaning, accepted, tested, strict=True)
        ]


class Calibration:
    """What a drafter's confidence is worth: the acceptance of tokens of like confidence, learned from verdicts."""

    #: classes of confidence
    NUM_CLASSES = 20
    #: tokens' worth of trust in the drafter's own word
    PRIOR_WEIGHT = 8.0
    #: tokens of a class over which old ones fade to 1/e
    MEMORY = 400.0

    def __init__(self) -> None:
        self._tested = [0.0] * self.NUM_CLASSES
        self._accepted = [0.0] * self.NUM_CLASSES

    def observe(self, confidence: Sequence[float], accepted: int) -> None:
        """A draft of such confidences was sent, of which the first `accepted` tokens were right."""
        fade = 1.0 - 1.0 / self.MEMORY
        for depth, sure in enumerate(confidence[: accepted + 1]):
            index = self._class(sure)
            self._tested[index] = self._tested[index] * fade + 1.0
            self._accepted[index] = self._accepted[index] * fade + (depth < accepted)

    def probability(self, confidence: float) -> float:
        """Probability that such a token is accepted if those before it were, on the hopeful side."""
        index, weight = self._class(confidence), self.PRIOR_WEIGHT
        chance = (weight * confidence + self._accepted[index]) / (weight + self._tested[index])
        return min(MOST_SURE, _hopeful(chance, weight + self._tested[index]))

    def _class(self, confidence: float) -> int:
        return min(int(confidence * self.NUM_CLASSES), self.NUM_CLASSES - 1)


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

    def __init__(self, max_draft: int = MAX_DRAFT) -> None:
        self.costs = Costs()
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
