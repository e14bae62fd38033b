"""What a pair of head and tail will give, by what its rounds cost so far: speed, traffic, money, and what limits it.

A round's way around is draft + head + link + tail; L of them are in flight, and the busiest part lets them pass one by
one: period = max(around / L, draft + head, tail, wire), as `workers.head.speculation` plans with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.figures import HeadFigures

#: rounds below which the averages say little
FEWEST_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of one pair, with as many texts in slots as it had."""

    #: milliseconds of a round's way around
    round_ms: float
    tokens_per_s: float
    #: through the wire server, up and down together
    gb_per_hour: float
    cost_per_hour: float
    cost_per_million_tokens: float
    #: "round trip", "bandwidth", "head" or "tail"
    limit: str


def expected(figures: HeadFigures, cost_per_gb: float) -> Expectation | None:
    """None for a pair with too few rounds so far. Times are averages over all frames, those of prefill included."""
    rounds, tokens = figures.rounds_total, figures.tokens_total
    if rounds < FEWEST_ROUNDS or not tokens:
        return None
    head_s = (figures.draft_s_total + figures.head_s_total) / rounds
    tail_s, link_s = figures.tail_s_total / rounds, figures.link_s_total / rounds
    wire_s = 0.0
    if figures.mbit_per_s_up:
        wire_s = 8e-6 * figures.bytes_up_total / rounds / figures.mbit_per_s_up
    busy_s = _tail_work_s(figures, tail_s)
    around_s = head_s + link_s + tail_s
    lanes = figures.lanes or figures.max_lanes
    periods = {"round trip": around_s / max(1, lanes), "bandwidth": wire_s, "head": head_s, "tail": busy_s}
    limit = max(periods, key=periods.__getitem__)
    if limit == "round trip" and link_s < head_s + tail_s:  # too few lanes, and the link is not why
        limit = "head" if head_s >= busy_s else "tail"
    tokens_per_s = tokens / rounds / max(*periods.values(), 1e-9)
    gb_per_token = (figures.bytes_up_total + figures.bytes_down_total) / tokens / 1e9
    gb_per_hour = 3600 * tokens_per_s * gb_per_token
    return Expectation(
        round_ms=1000 * around_s,
        tokens_per_s=tokens_per_s,
        gb_per_hour=gb_per_hour,
        cost_per_hour=gb_per_hour * cost_per_gb,
        cost_per_million_tokens=1e6 * gb_per_token * cost_per_gb,
        limit=limit,
    )


def _tail_work_s(figures: HeadFigures, tail_s: float) -> float:
    """The tail's work for a round, without waiting; all of its time where the tail told nothing."""
    if figures.tail is None or not figures.tail.tokens:
        return tail_s
    return min(tail_s, figures.tail.compute_s / figures.tail.tokens * figures.tokens_total / figures.rounds_total)
