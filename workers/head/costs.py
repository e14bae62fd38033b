"""What rounds cost, measured while they run: lines fitted to sizes and times. No torch, no I/O.

`workers.head.speculation` says which costs there are and what is planned from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median


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

    def __init__(self, *, drafts_apart: bool = False) -> None:
        """`drafts_apart`: the drafter works beside the head's half, not in turn with it."""
        self._drafts_apart = drafts_apart
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
        draft, head = self.draft_s(draft_steps, rows), self.head_s(rows * (1 + longest))
        tail = self.tail_s(rows * (1 + longest))
        around = draft + head + median(self._around) + tail
        return lanes * max(self.busy_s(draft, head), tail) >= self.SATURATED * around

    @property
    def known(self) -> bool:
        """Whether rounds of more than one size were measured well enough: before, slopes are guesses."""
        return self._head.num_sizes > 1 and self._tail.num_sizes > 1

    def busy_s(self, draft_s: float, head_s: float) -> float:
        """How long a round that takes these times keeps drafter and head from the next one."""
        return max(draft_s, head_s) if self._drafts_apart else draft_s + head_s

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
