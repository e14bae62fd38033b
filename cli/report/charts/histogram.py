"""How often a duration was how long."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from cli.output import counted
from cli.report.charts.area import duration_short
from cli.report.charts.axes import Axis
from cli.report.charts.bars import Bar, columns
from cli.report.charts.element import Element

_NUM_BARS = 20
#: the longest durations are put together if the longest is so many times the 99th percentile
_TAIL = 1.5


def percentile(ascending: Sequence[float], share: float) -> float:
    """The least value that `share` of the values do not exceed; there is one at least."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def histogram(title: str, ascending: Sequence[float], color: str) -> Element:
    """Durations in seconds, in ascending order, one at least; lines at their median and 90th and 99th percentile."""
    p50, p90, p99 = (percentile(ascending, share) for share in (0.5, 0.9, 0.99))
    largest = ascending[-1]
    across = Axis.to(p99 if largest > _TAIL * p99 else largest, "seconds")
    width = across.end / _NUM_BARS
    edges = [bisect_left(ascending, index * width) for index in range(_NUM_BARS)]
    counts = [later - sooner for sooner, later in zip(edges, [*edges[1:], len(ascending)], strict=True)]
    bars = [
        Bar(index * width, (index + 1) * width, count, f"{_between(index, width, largest)}: {counted(count, 'job')}")
        for index, count in enumerate(counts)
        if count
    ]
    marks = [
        Bar(value, value, 0, f"{name}: {duration_short(value)}")
        for name, value in (("median", p50), ("90th percentile", p90), ("99th percentile", p99))
    ]
    description = (
        f"{counted(len(ascending), 'job')}: median {duration_short(p50)}, 90% within {duration_short(p90)}, "
        f"99% within {duration_short(p99)}, longest {duration_short(largest)}."
    )
    return columns(title, description, bars, across, Axis.to(max(counts), "jobs", whole=True), color, marks=marks)


def _between(index: int, width: float, largest: float) -> str:
    end = max(largest, (index + 1) * width) if index == _NUM_BARS - 1 else (index + 1) * width
    return f"{duration_short(index * width)} to {duration_short(end)}"
