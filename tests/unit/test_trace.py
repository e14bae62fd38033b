"""A trace is a timeline that any viewer opens, whenever the head ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.errors import TraceUnwritable
from workers.head.trace import ChromeTrace, NoTrace, open_trace


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X"]


def labels(path: Path) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events(path) if event["name"] == "thread_name"}


def test_a_span_says_when_how_long_and_how_much(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.span("head", 2, 1.5, 1.75, rows=3, tokens=27)
    trace.close()
    (span,) = spans(tmp_path / "t.json")
    assert (span["name"], span["ts"], span["dur"]) == ("head", 1_500_000, 250_000)
    assert span["args"] == {"rows": 3, "tokens": 27}
    assert labels(tmp_path / "t.json")[span["tid"]] == "lane 2 · head"


def test_the_file_is_whole_after_every_span(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    for number in range(5):
        assert len(spans(tmp_path / "t.json")) == number
        trace.span("idle", None, number, number + 1)


def test_a_killed_head_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    script = f"""
import itertools
from workers.head.trace import ChromeTrace
trace = ChromeTrace({str(path)!r})
for number in itertools.count():
    trace.span("link", number % 4, number, number + 1, bytes=number)
    if number == 500:
        print("there", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert len(spans(path)) > 500


def test_spans_of_one_name_that_overlap_lie_on_different_tracks(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.span("prefill", 0, 0.0, 1.0)
    trace.span("prefill", 0, 0.5, 1.5)
    trace.span("prefill", 0, 1.0, 2.0)
    first, second, third = [span["tid"] for span in spans(tmp_path / "t.json")]
    assert first == third != second
    assert labels(tmp_path / "t.json")[second] == "lane 0 · prefill 2"


def test_tracks_of_a_lane_stand_together(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    for name, lane in [("link", 1), ("link", 0), ("head", 1), ("idle", None), ("head", 0)]:
        trace.span(name, lane, 0.0, 1.0)
    order = {
        event["tid"]: event["args"]["sort_index"]
        for event in events(tmp_path / "t.json")
        if event["name"] == "thread_sort_index"
    }
    names = labels(tmp_path / "t.json")
    assert [names[track] for track in sorted(names, key=lambda track: order[track])] == [
        "head · idle",
        "lane 0 · link",
        "lane 0 · head",
        "lane 1 · link",
        "lane 1 · head",
    ]


def test_a_full_trace_stops_growing_and_stays_whole(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json", max_bytes=2_000)
    for number in range(1_000):
        trace.span("head", 0, number, number + 1)
    assert 2_000 <= (tmp_path / "t.json").stat().st_size < 2_500
    assert spans(tmp_path / "t.json")


def test_spans_after_the_end_go_nowhere(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    trace.close()
    trace.close()
    trace.span("head", 0, 0.0, 1.0)
    assert not spans(tmp_path / "t.json")


def test_an_earlier_trace_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("x" * 10_000)
    ChromeTrace(tmp_path / "t.json").close()
    assert not spans(tmp_path / "t.json")


def test_a_path_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceUnwritable, match=r"no/such/place\.json"):
        open_trace(str(tmp_path / "no" / "such" / "place.json"))


def test_no_path_means_no_trace() -> None:
    trace = open_trace(None)
    assert isinstance(trace, NoTrace)
    trace.span("head", 0, 0.0, 1.0)
    trace.close()
