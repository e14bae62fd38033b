"""The report as a browser shows it, of a batch whose figures are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from cli.report.charts.area import duration_short
from cli.report.charts.axes import Axis, round_duration
from storage.batch_records import NewBatch
from storage.batches import add_jobs, begin_submission, publish_batch
from storage.job_records import NewJob
from storage.outcomes import record_outcomes
from storage.series import batch_series
from storage.states import JobState
from tests.browser import running_browser
from tests.cli_runner import Shardq, error_of, outcome

HOSTILE = '<script>alert(1)</script><img src="https://example.org/x" onerror="alert(2)">&amp;\'"'
ROUNDS = ((2,), (0, 1), (1, 0, 3))


@pytest.fixture(scope="module")
def shardq(tmp_path_factory: pytest.TempPathFactory) -> Shardq:
    """One batch with two jobs that succeeded and two that failed, and others."""
    shardq = Shardq(tmp_path_factory.mktemp("report"), {})
    names = ["a", HOSTILE, "c", "d"]
    batch = submit(shardq, "nightly <b>", *names)
    jobs = shardq.jobs(batch)
    ends = [JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED, JobState.FAILED]
    rows = [outcome(jobs[name], end) for name, end in zip(names, ends, strict=True)]
    first = replace(rows[0], started_at=0.0, finished_at=4.0, ttft_s=1.0, rounds_by_draft=ROUNDS, link_s=3.0)
    second = replace(rows[1], started_at=2.0, finished_at=8.0, ttft_s=0.5, rounds_by_draft=((1,),), tail_s=1.0)
    with shardq.database() as database:
        record_outcomes(database, [first, second, *(replace(row, error_message=HOSTILE) for row in rows[2:])])
    submit(shardq, "waiting", "only")
    failed = submit(shardq, "failed", "x")
    shardq.end_jobs(failed, x=JobState.FAILED)
    return shardq


def submit(shardq: Shardq, name: str, *custom_ids: str) -> str:
    """Publish a batch with these jobs; its id."""
    with shardq.database() as database:
        submission = begin_submission(database, NewBatch("hash", name=name))
        add_jobs(database, submission, [NewJob(n, key, "m", "/u", "{}") for n, key in enumerate(custom_ids, 1)])
        return publish_batch(database, submission).id


def report(shardq: Shardq, batch: str) -> str:
    result = shardq("report", batch, "--output", "-")
    assert result.exit_code == 0, result.stderr
    return result.stdout


@dataclass(frozen=True, slots=True)
class Shown:
    """What a browser made of the page."""

    complaints: list[str]
    requests: list[str]
    text: str
    charts: int
    images: int
    scripts: int
    #: by color scheme
    background: dict[str, str]
    #: pixels by which the page is wider than the window
    overflow: int
    #: chart → what its shapes say, in order
    marks: dict[str, list[str]]
    #: pixels of the smallest text in a chart
    smallest_text: float
    #: labels that leave their chart
    cut_off: list[str]


_MARKS = """Object.fromEntries([...document.querySelectorAll("svg")].map(svg => [
  svg.querySelector(":scope > title").textContent,
  [...svg.querySelectorAll("rect > title, line > title")].map(title => title.textContent)]))"""
_SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll("svg text")].map(text =>
  parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""
_CUT_OFF = """[...document.querySelectorAll("svg text")].filter(text => {
  const box = text.getBBox(), whole = text.ownerSVGElement.viewBox.baseVal;
  return box.x < -0.5 || box.x + box.width > whole.width + 0.5 || box.y + box.height > whole.height + 0.5;
}).map(text => text.textContent)"""


@pytest.fixture(scope="module")
def shown(shardq: Shardq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert shardq("report", "nightly <b>", "--output", str(path)).exit_code == 0
    complaints: list[str] = []
    requests: list[str] = []
    with running_browser() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="light")
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        color = "getComputedStyle(document.body).backgroundColor"
        background = {"light": page.evaluate(color)}
        page.emulate_media(color_scheme="dark")
        background["dark"] = page.evaluate(color)
        yield Shown(
            complaints,
            requests,
            page.inner_text("body"),
            page.locator("svg[role=img]").count(),
            page.locator("img").count(),
            page.locator("script").count(),
            background,
            page.evaluate("document.documentElement.scrollWidth - window.innerWidth"),
            page.evaluate(_MARKS),
            page.evaluate(_SMALLEST_TEXT),
            page.evaluate(_CUT_OFF),
        )


def test_the_page_asks_for_nothing_and_complains_of_nothing(shown: Shown) -> None:
    assert shown.complaints == []
    assert [url.partition(":")[0] for url in shown.requests] == ["file"]


def test_what_users_wrote_is_text_and_no_markup(shown: Shown) -> None:
    assert (shown.images, shown.scripts) == (0, 0)
    assert "nightly <b>" in shown.text
    assert "<script>alert(1)</script>" in shown.text
    assert 'onerror="alert(2)">&amp;' in shown.text


def test_a_telephone_shows_it_without_scrolling_sideways_and_dark_is_dark(shown: Shown) -> None:
    assert shown.overflow <= 0
    assert shown.background == {"light": "rgb(246, 247, 249)", "dark": "rgb(20, 23, 27)"}


def test_the_figures_are_those_of_the_database(shown: Shown, shardq: Shardq) -> None:
    figures = shardq.status("nightly <b>")["figures"]
    shares = f"{100 * figures['accepted'] / figures['drafted']:.0f}%"
    lines = shown.text.splitlines()
    headline = dict(pairwise(lines))
    assert headline["completion tokens"] == str(figures["completion_tokens"])
    assert headline["accepted"] == shares
    assert headline["succeeded"] == "2 of 4"
    assert shown.charts == 8


def test_every_chart_has_marks_that_say_what_the_database_holds(shown: Shown, shardq: Shardq) -> None:
    with shardq.database() as database:
        series = batch_series(database, shardq.status("nightly <b>")["id"])
    assert series.over_time is not None
    assert all(shown.marks.values()), shown.marks
    # an interval of the chart says its middle and its value: "1.2s: 1.5 tokens/s"
    for chart, values in (
        ("Tokens per second", series.over_time.tokens_per_s),
        ("Slots in use", series.over_time.jobs),
    ):
        told = [float(mark.partition(": ")[2].split()[0]) for mark in shown.marks[chart]]
        assert told == pytest.approx(values, rel=0.01)
    bars = [mark for mark in shown.marks["Latency"] if mark.endswith((" job", " jobs"))]
    assert sum(int(mark.rpartition(": ")[2].split()[0]) for mark in bars) == len(series.latency_s)
    assert shown.marks["Acceptance by position"] == ["token 1: 4 of 5 accepted (80%)", "token 2: 3 of 4 accepted (75%)"]
    assert "link: 3s · 75%" in shown.marks["Where the time went"]


def test_no_text_of_a_chart_is_tiny_or_cut_off_on_a_telephone(shown: Shown) -> None:
    assert shown.smallest_text >= 11
    assert shown.cut_off == []


@pytest.mark.parametrize(
    ("rough", "step"),
    [(0.3, 0.5), (3, 5), (16, 30), (76, 120), (700, 900), (4000, 7200), (90_000, 172_800)],
)
def test_a_time_axis_has_marks_at_durations_people_count_in(rough: float, step: float) -> None:
    assert round_duration(rough) == pytest.approx(step)


@pytest.mark.parametrize(
    ("largest", "ticks"),
    [(1, (0, 1)), (3, (0, 1, 2, 3)), (9, (0, 5, 10)), (30, (0, 10, 20, 30)), (95, (0, 25, 50, 75, 100))],
)
def test_what_is_counted_has_whole_marks(largest: int, ticks: tuple[int, ...]) -> None:
    assert Axis.to(largest, "jobs", whole=True).ticks == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.00047, "0.47ms"), (0.0047, "4.7ms"), (0.0681, "68.1ms"), (0.9994, "999ms"), (0.9996, "1s")],
)
def test_short_times_are_in_milliseconds(seconds: float, text: str) -> None:
    assert duration_short(seconds) == text


def test_tokens_and_slots_over_time_add_up_to_the_jobs(shardq: Shardq) -> None:
    with shardq.database() as database:
        series = batch_series(database, shardq.status("nightly <b>")["id"])
    assert series.over_time is not None
    seconds = series.over_time.width_s
    assert sum(series.over_time.tokens_per_s) * seconds == pytest.approx(6)
    # failed jobs had slots too, from 1 s to 3 s
    assert sum(series.over_time.jobs) * seconds == pytest.approx(4 + 6 + 2 + 2)
    assert max(series.over_time.jobs) == pytest.approx(4)
    assert series.rounds_by_draft == ((3,), (0, 1), (1, 0, 3))
    assert list(series.ttft_s) == [0.5, 1.0]


def test_acceptance_is_told_by_position_and_by_length(shardq: Shardq) -> None:
    html = report(shardq, "nightly <b>")
    assert "token 1: 4 of 5 accepted (80%)" in html
    assert "token 2: 3 of 4 accepted (75%)" in html
    assert "drafts of 2: 75% accepted, 4 rounds" in html


@pytest.mark.parametrize("batch", ["waiting", "failed"])
def test_a_batch_without_results_says_so(shardq: Shardq, batch: str) -> None:
    html = report(shardq, batch)
    assert "Nothing to show yet" in html


def test_a_file_that_cannot_be_written_is_one_line(shardq: Shardq, tmp_path: Path) -> None:
    assert "cannot write" in error_of(shardq("report", "waiting", "--output", str(tmp_path / "no" / "r.html")))
