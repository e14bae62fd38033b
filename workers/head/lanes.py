"""Which rows travel together, and how many rounds are in flight at once. No torch, no I/O.

A lane is a place for one round in flight. While lane A's round is on its way, the head works on lane B's: more lanes
hide the link, and cost efficiency, for the same rows go through both halves in smaller forwards. Rows belong to no
lane: whenever one is free, it takes the rows that have waited longest, at most an even share of all, and no more than
a frame holds. So lanes stay even as jobs come and go, and a row changes lanes only between its rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from relay.fields import MAX_ROWS
from workers.head.costs import Costs
from workers.head.speculation import period_s

R = TypeVar("R")

#: another number of lanes must promise rounds shorter by this part
WORTH_A_CHANGE = 0.05


class Lanes:
    """The lanes of an epoch."""

    def __init__(self, most: int, *, fixed: bool) -> None:
        """`fixed`: always `most` lanes; else as many as measured times ask for, up to that."""
        self._fixed = fixed
        self._most = most
        self._busy: set[int] = set()
        self._most_rows = MAX_ROWS
        #: rounds that may be in flight at once
        self.num = most if fixed else 1

    def adapt(self, rows: int, longest: int, costs: Costs) -> None:
        """Choose the number of lanes for so many rows that draft up to `longest` tokens."""
        if not self._fixed and rows:
            wanted = num_lanes(rows, longest, costs, most=self._most, present=self.num)
            self.num = max(wanted, min(self._most, -(-rows // self._most_rows)))

    def num_used(self, rows: int) -> int:
        """Rounds that so many rows keep in flight."""
        share = self._share(rows)
        return min(self.num, -(-rows // share)) if share else 1

    def share(self, ready: Sequence[R], rows: int) -> tuple[int, list[R]] | None:
        """A free lane and the rows it takes of those `ready`, of `rows` in all; None: no lane, or no row."""
        if not ready or len(self._busy) >= self.num:
            return None
        lane = next(lane for lane in range(self._most) if lane not in self._busy)
        self._busy.add(lane)
        return lane, list(ready[: self._share(rows)])

    def answered(self, lane: int) -> None:
        """The lane's round is back."""
        self._busy.discard(lane)

    def open(self, most_rows: int) -> None:
        """A link opens, a frame of which holds so many rows: nothing is in flight any more."""
        self._most_rows = most_rows
        self._busy.clear()

    def _share(self, rows: int) -> int:
        return min(-(-rows // self.num), self._most_rows)


def num_lanes(rows: int, longest: int, costs: Costs, *, most: int, present: int) -> int:
    """The number of lanes with which all rows get their round soonest; of equally good ones the smallest.

    n lanes of r = rows / n rows each take n · period(n) seconds for a round of every row, with the period of
    `workers.head.speculation`: max((draft + head + link + tail) / n, draft + head, tail, wire). Where compute costs
    nothing per row, one lane is as good as many; where it costs little besides, this comes to about
    1 + (link + tail) / (draft + head) lanes.
    """

    def turn_s(num: int) -> float:
        share = -(-rows // num)
        used = -(-rows // share)
        return used * period_s(share, longest, share * (1 + longest), costs, lanes=used)

    candidates = range(1, min(most, rows) + 1)
    best = min(candidates, key=turn_s)
    if present not in candidates:
        return best
    return best if turn_s(best) < (1.0 - WORTH_A_CHANGE) * turn_s(present) else present
