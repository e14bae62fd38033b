"""The live figures of heads and tails: counted as told, told in time, and small."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import torch

from relay.codec import decode, encode
from relay.fields import INT63
from relay.messages import Accepted, Draft, Round, Tensor, Verdict, Void, VoidReason
from relay.profile import Profile
from relay.tail_figures import TailFigures
from tasks.figures import MAX_FIGURES_BYTES, HeadFigures
from tasks.heads import HeadInfo
from workers.head.costs import Costs
from workers.head.courier import Answered
from workers.head.gauge import HeadGauge
from workers.head.ledger import Spent
from workers.tail.gauge import TELL_EVERY_S, TailGauge

CPU = torch.device("cpu")
#: longest id that `relay.keys.new_tail_id` gives
LONGEST_TAIL_ID = "t" * 63 + "-01234567"
VERDICT = Verdict(1, (Accepted(0, 1, 0, 2, (5, 6, 7)), Void(1, 1, 0, VoidReason.BASE)), 0.5)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def answered(verdict: Verdict) -> Answered:
    frame = Round(1, (Draft(0, 1, 0, 9, 3, (5, 6)),), Tensor("float32", (3, 1), bytes(12)))
    return Answered(0, frame, verdict, 10.0, 10.7, 1000, 50, False)


def costs_of_a_link(rtt_s: float, byte_s: float) -> Costs:
    costs = Costs()
    for num_bytes in (1000, 100_000) * 4:
        costs.observe_round(
            rows=1,
            longest=num_bytes // 1000,
            tokens=1,
            draft_steps=0,
            draft_s=0.0,
            head_s=0.01,
            link_s=rtt_s + num_bytes * byte_s,
            tail_s=0.01,
            bytes_up=num_bytes,
        )
    return costs


def test_a_tail_tells_its_totals_with_one_verdict_every_two_seconds() -> None:
    clock = Clock()
    gauge = TailGauge(CPU, clock)
    assert gauge.marked(VERDICT).figures == TailFigures(2, 3, 0.5, 0.0)
    clock.now += TELL_EVERY_S - 0.1
    assert gauge.marked(VERDICT).figures is None
    clock.now += 0.1
    assert gauge.marked(VERDICT).figures == TailFigures(6, 9, 1.5, TELL_EVERY_S)


def test_a_tails_figures_cross_the_wire_and_cost_a_byte_when_they_are_not_there() -> None:
    figures = TailFigures(INT63, INT63, 1e9, 1e9, INT63, INT63)
    told = replace(VERDICT, figures=figures)
    assert decode(encode(told)) == told
    assert len(encode(told)) - len(encode(VERDICT)) < 80


def test_a_head_counts_frames_rounds_and_tokens_and_passes_its_tails_figures_on() -> None:
    gauge = HeadGauge("ngram", 8, CPU, Clock())
    gauge.opened("gpu-b-01234567")
    gauge.began(40)
    told = TailFigures(2, 3, 0.5, 1.0)
    gauge.answered(answered(replace(VERDICT, figures=told)), Spent(0.1, 0.2, 0.3, 0.4, 0, 0), is_round=True)
    gauge.answered(answered(VERDICT), Spent(0.0, 0.2, 0.3, 0.4, 0, 0), is_round=False)
    gauge.committed(1, None, 0)
    gauge.committed(3, 4, 2)
    figures = gauge.figures(1, 2, 12.345)
    assert (figures.rounds_total, figures.row_rounds_total) == (1, 1)
    assert (figures.tokens_total, figures.round_tokens_total, figures.prompt_tokens_total) == (4, 3, 40)
    assert (figures.drafted_total, figures.accepted_total, figures.acceptance) == (4, 2, 0.5)
    assert (figures.bytes_up_total, figures.bytes_down_total) == (2000, 100)
    assert (figures.head_s_total, figures.link_s_total, figures.tail_s_total) == (0.4, 0.6, 0.8)
    assert (figures.running, figures.waiting, figures.tokens_per_s) == (1, 2, round(12.345, 2))
    assert (figures.tail_id, figures.tail) == ("gpu-b-01234567", told)


def test_an_idle_tail_grows_older() -> None:
    clock = Clock()
    gauge = HeadGauge("ngram", 8, CPU, clock)
    gauge.opened("gpu-b-01234567")
    told = TailFigures(2, 3, 0.5, 145.0)
    gauge.answered(answered(replace(VERDICT, figures=told)), Spent(0, 0, 0, 0, 0, 0), is_round=True)
    clock.now += 60
    assert gauge.figures(0, 0, 0.0).tail == replace(told, uptime_s=205.0)
    gauge.answered(
        answered(replace(VERDICT, figures=replace(told, uptime_s=206.0))), Spent(0, 0, 0, 0, 0, 0), is_round=True
    )
    assert gauge.figures(0, 0, 0.0).tail == replace(told, uptime_s=206.0)


def test_acceptance_is_of_late_and_unknown_without_drafts() -> None:
    gauge = HeadGauge("ngram", 8, CPU)
    gauge.committed(3, 4, 2)
    assert gauge.figures(1, 0, 0.0).acceptance == 0.5
    for _ in range(8):
        latest = gauge.figures(1, 0, 0.0)
    assert (latest.acceptance, latest.tokens_per_round, latest.drafted_total) == (None, None, 4)


def test_a_new_epochs_tail_is_not_shown_with_the_old_ones_figures() -> None:
    gauge = HeadGauge("ngram", 8, CPU)
    gauge.opened("a-01234567")
    gauge.answered(
        answered(replace(VERDICT, figures=TailFigures(2, 3, 0.5, 1.0))), Spent(0, 0, 0, 0, 0, 0), is_round=True
    )
    gauge.opened("b-01234567")
    assert (gauge.figures(0, 0, 0.0).tail_id, gauge.figures(0, 0, 0.0).tail) == ("b-01234567", None)


def test_round_trip_and_bandwidth_are_those_that_rounds_showed() -> None:
    gauge = HeadGauge("ngram", 8, CPU)
    gauge.answered(answered(VERDICT), Spent(0, 0, 0, 0, 0, 0), is_round=True)
    # two wires one after another, each of 1e6 bytes/s: a byte is on its way for 2e-6 s
    gauge.measure(2, costs_of_a_link(0.08, 2e-6))
    figures = gauge.figures(4, 0, 0.0)
    assert figures.rtt_ms is not None
    assert abs(figures.rtt_ms - 80) < 0.1
    assert figures.mbit_per_s_up is not None
    assert abs(figures.mbit_per_s_up - 8.0) < 0.1
    assert figures.lanes == 2


def test_a_head_without_a_wire_tells_no_link() -> None:
    gauge = HeadGauge("none", 1, CPU)
    gauge.measure(1, costs_of_a_link(0.0, 0.0))
    assert (gauge.figures(1, 0, 0.0).rtt_ms, gauge.figures(1, 0, 0.0).mbit_per_s_up) == (None, None)


def largest() -> HeadFigures:
    values: dict[str, object] = {}
    for field in fields(HeadFigures):
        kind = str(field.type)
        values[field.name] = INT63 if kind == "int" else 123456789012.3456 if kind.startswith("float") else "suffix"
    tail = TailFigures(INT63, INT63, 1e9 / 3, 1e9 / 3, INT63, INT63)
    return HeadFigures(**{**values, "tail_id": LONGEST_TAIL_ID, "tail": tail})  # type: ignore[arg-type]


def test_the_largest_figures_stay_below_two_kilobytes() -> None:
    text = json.dumps(asdict(largest()))
    assert 1000 < len(text) <= MAX_FIGURES_BYTES


def test_figures_come_out_of_a_presence_as_they_went_in_and_may_be_missing() -> None:
    profile = Profile("f00d", "float32", "none", "float32", False, 256)
    info = HeadInfo("h", "i", "m", profile, 4, (), True, 1, 1.0, 1.0, figures=largest())
    assert HeadInfo.from_json(info.to_json()) == info
    old = json.loads(info.to_json())
    del old["figures"]
    assert HeadInfo.from_json(json.dumps(old)).figures is None
