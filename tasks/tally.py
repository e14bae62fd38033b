"""What a bookkeeper has recorded since it started, counted for `/metrics`. One thread counts, others look."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from storage.job_records import OutcomeRow

#: upper bounds in seconds of the histograms' buckets
TTFT_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LATENCY_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Histogram:
    """Durations by bucket."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Take one in."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not above it), the last bound is `+Inf`."""
        number, found = 0, []
        for bound, count in zip([*map(str, self._bounds_s), "+Inf"], list(self._counts), strict=True):
            number += count
            found.append((bound, float(number)))
        return found

    @property
    def sum_s(self) -> float:
        """Of all that were taken in."""
        return self._sum_s


class ModelTally:
    """Outcomes of one served name by how they ended, and how long they took."""

    def __init__(self) -> None:
        self._ends: Counter[str] = Counter(dict.fromkeys(("stop", "length", "failed", "cancelled", "expired"), 0))
        #: from the beginning in a slot to the first token, and to the end
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.latency = Histogram(LATENCY_BOUNDS_S)

    def recorded(self, row: OutcomeRow) -> None:
        """This one stands in the database now."""
        self._ends[str(row.finish_reason or row.state)] += 1
        if row.ttft_s is not None:
            self.ttft.observe(max(0.0, row.ttft_s))
        if row.started_at is not None and row.finished_at is not None:
            self.latency.observe(max(0.0, row.finished_at - row.started_at))

    def ends(self) -> dict[str, int]:
        """How many outcomes ended so: a completed one by its finish reason, others by their state."""
        return dict(self._ends)


class Tally:
    """Outcomes by served name. A record that came twice counts once."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTally] = {}

    def recorded(self, outcomes: Iterable[tuple[str, OutcomeRow]]) -> None:
        """These stand in the database now, each with its job's served name."""
        for model, row in outcomes:
            self._models.setdefault(model, ModelTally()).recorded(row)

    def models(self) -> dict[str, ModelTally]:
        """What was counted, by served name."""
        return dict(self._models)
