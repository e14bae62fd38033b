"""Rates, remaining time and the plain progress lines."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
from types import ModuleType

import pytest

from cli.client.voice import Snapshot
from cli.client.waiting import STALL_S, Pace, StallWatch
from cli.output import duration, figure, first_words, percent, size
from cli.ticker import Ticker
from cli.watch import LiveDisplay, NotebookDisplay, PlainDisplay, line_of
from storage.batch_records import Counts, Progress
from storage.states import BatchStatus


def report(completed: int, total: int, tokens: int, *, failed: int = 0, running: int = 0) -> Progress:
    waiting = total - completed - failed - running
    counts = Counts(waiting=waiting, running=running, completed=completed, failed=failed)
    return Progress(BatchStatus.IN_PROGRESS, counts, tokens)


def test_overall_speed_is_tokens_over_the_time_since_publication() -> None:
    pace = Pace(started_at=100.0)
    snapshot = pace.snapshot(110.0, report(1, 4, 50), None)
    assert snapshot.tps_overall == pytest.approx(5.0)
    assert snapshot.elapsed_s == 10.0


def test_present_speed_is_that_of_the_last_seconds() -> None:
    pace = Pace(started_at=0.0)
    for second in range(100):
        snapshot = pace.snapshot(float(second), report(0, 4, 1000 if second >= 95 else 0), None)
    assert snapshot.tps_now == pytest.approx(1000 / 15)


def test_texts_of_stopped_jobs_are_no_present_speed() -> None:
    pace = Pace(started_at=0.0)
    pace.snapshot(100.0, Progress(BatchStatus.CANCELLING, Counts(running=3, completed=1), 50), None)
    ended = Progress(BatchStatus.CANCELLED, Counts(completed=2, cancelled=2), 460, stopped_tokens=400)
    snapshot = pace.snapshot(101.0, ended, None)
    assert snapshot.tps_now == pytest.approx(10.0)
    assert snapshot.tps_overall == pytest.approx(460 / 101)


def test_what_the_heads_say_is_the_present_speed() -> None:
    assert Pace(0.0).snapshot(1.0, report(0, 4, 0), 31.5).tps_now == 31.5


def test_the_remaining_time_counts_only_what_ended_while_we_watched() -> None:
    pace = Pace(started_at=0.0)
    assert pace.snapshot(1000.0, report(50, 100, 0), None).eta_s is None
    assert pace.snapshot(1010.0, report(60, 100, 0), None).eta_s == pytest.approx(40.0)


def test_a_finished_batch_has_no_remaining_time() -> None:
    assert Pace(0.0).snapshot(5.0, report(3, 4, 10, failed=1), None).eta_s == 0.0


def test_jobs_that_were_stopped_are_told_beside_those_that_failed() -> None:
    counts = Counts(running=2, completed=3, failed=1, cancelled=4, expired=5)
    going = Pace(0.0).snapshot(1.0, Progress(BatchStatus.IN_PROGRESS, counts, 0), None)
    assert line_of(going).startswith("13/15 done, 1 failed, 4 cancelled, 5 expired, 2 running,")
    stopping = Pace(0.0).snapshot(1.0, Progress(BatchStatus.CANCELLING, counts, 0), None)
    assert "2 stopping," in line_of(stopping)


def test_plain_lines_come_at_most_every_five_seconds_and_always_at_the_end() -> None:
    lines: list[str] = []
    display = PlainDisplay(lines.append)
    for second in range(12):
        counts = Counts(running=12 - second, completed=second)
        display.show(Snapshot(counts, 0, float(second), None, None, None))
    display.show(Snapshot(Counts(completed=12), 0, 12.0, None, None, 0.0))
    assert [line.split(" ")[0] for line in lines] == ["0/12", "5/12", "10/12", "12/12"]


def test_plain_lines_are_rare_while_nothing_changes() -> None:
    lines: list[str] = []
    display = PlainDisplay(lines.append)
    for second in range(120):
        display.show(Snapshot(Counts(waiting=3), 0, float(second), None, None, None))
    assert len(lines) == 2


class Output:
    """An output below a notebook's cell."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert (raw, display_id) == (True, True)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.texts.append(bundle["text/plain"])


def test_below_a_notebooks_cell_stands_one_line_that_is_redrawn_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = Output()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", ModuleType("IPython.display"))
    monkeypatch.setattr(sys.modules["IPython.display"], "display", output.display, raising=False)
    display = NotebookDisplay()
    for completed in (0, 2, 2, 4):
        display.show(Snapshot(Counts(waiting=4 - completed, completed=completed), 0, 1.0, None, None, None))
    display.close()
    assert [text.split(" done")[0] for text in output.texts] == [
        f"{'█' * full}{'░' * (20 - full)} {done}/4" for full, done in ((0, 0), (10, 2), (20, 4))
    ]


def test_a_stall_is_explained_once_per_pause() -> None:
    now = [0.0]
    said: list[str] = []
    watch = StallWatch(said.append, lambda: ["no head"], clock=lambda: now[0])
    for _ in range(int(2.5 * STALL_S)):
        watch(Counts(waiting=1))
        now[0] += 1
    assert said == ["no head", "no head"]


def test_running_jobs_are_no_stall() -> None:
    now = [0.0]
    said: list[str] = []
    watch = StallWatch(said.append, lambda: ["no head"], clock=lambda: now[0])
    for _ in range(100):
        watch(Counts(running=1))
        now[0] += 1
    assert said == []


def test_the_last_line_says_how_long_it_took() -> None:
    going = Pace(0.0).snapshot(5.0, report(1, 2, 9, running=1), None)
    assert line_of(going).endswith("ETA –")
    ended = Pace(0.0).snapshot(136.0, report(1, 2, 9, failed=1), None)
    assert line_of(ended).endswith(" overall, took 2m16s")


@pytest.mark.parametrize("width", [10, 40, 60, 80, 130])
def test_progress_is_one_line_on_any_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setenv("COLUMNS", str(width))
    display = LiveDisplay()
    counts = Counts(running=32, completed=1000, failed=123, cancelled=4, expired=5, waiting=100_000)
    display.show(Snapshot(counts, 10**6, 3600.0, 1234.5, 1234.5, 7800.0))
    display.close()
    (line,) = [line for line in err.getvalue().split("\n") if line]
    assert "\r" not in line
    assert line.lstrip().startswith("1132/101164"[: width - 1])
    for words, fewest in (("1,234.5 overall", 130), ("tok/s now", 130), ("ETA 2h10m", 80)):
        assert (words in line) == (width >= fewest), words


def test_short_work_shows_no_progress() -> None:
    out = io.StringIO()
    with Ticker("checking", 100, out) as ticker:
        ticker.tick_bytes(50)
    assert out.getvalue() == ""


def test_long_work_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.ticker.PATIENCE_S", 0.0)
    out = io.StringIO()
    with Ticker("checking", 2_000_000, out) as ticker:
        ticker.tick_bytes(1_000_000)
        ticker.tick_bytes(1_500_000)
    assert out.getvalue() == "checking: 1.0 MB (50%)\n"


def test_what_goes_on_is_cut_to_a_terminals_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.ticker.PATIENCE_S", 0.0)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 20))
    with os.fdopen(slave, "w", encoding="utf-8") as out, Ticker("preparing a/model/of/a/long/name", out=out) as ticker:
        ticker.tick("layer 3")
        shown = os.read(master, 1000).decode()
    os.close(master)
    assert shown == "\r\x1b[Kpreparing a/model/…"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m"), (2_613_600, "30d06h")],
)
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_figures_without_a_value_are_a_dash() -> None:
    assert figure(None) == "–"
    assert figure(1234.56) == "1,234.6"
    assert percent(1, 0) == "–"
    assert percent(1, 3) == "33%"
    assert size(999) == "999 B"
    assert size(98_000_000) == "98.0 MB"
    assert first_words("a\n b  c", 80) == "a b c"
    assert first_words("abcdef", 4) == "abc…"
