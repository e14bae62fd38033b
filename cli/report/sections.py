"""The report's pictures, each in a section that says how its values came about, or why there are none."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cli.output import NOTHING, figure, first_words
from cli.report.charts.area import area, duration_short
from cli.report.charts.axes import Axis, whole_shares
from cli.report.charts.bars import Bar, Named, columns, named_bars
from cli.report.charts.element import Element, element
from cli.report.charts.histogram import histogram
from storage.batch_records import BatchFigures
from storage.series import BatchSeries, ErrorKind, OverTime, SlowJob

Rounds = Sequence[Sequence[int]]


def sections(figures: BatchFigures, series: BatchSeries) -> list[Element]:
    """All of them, in their order."""
    return [
        _over_time("Tokens per second", series.over_time),
        _over_time("Slots in use", series.over_time),
        _time_split(figures),
        _by_position(series.rounds_by_draft),
        _by_length(series.rounds_by_draft),
        _finish_reasons(series.finish_reasons),
        _distribution("Time to first token", series.ttft_s, "From a job's slot to its first token.", "head"),
        _distribution("Latency", series.latency_s, "From a job's slot to its last token, waiting apart.", "link"),
        _slowest(series.slowest),
        _errors(series.errors),
    ]


def _section(title: str, note: str, content: Element | None, *, wide: bool = False) -> Element:
    note = note if content is not None else "Nothing to show yet: no job has ended that has this figure."
    kind = "wide" if wide else "card"
    return element("section", element("h2", title), element("p", note, class_="dim"), content, class_=kind)


def _over_time(title: str, series: OverTime | None) -> Element:
    chart: Element | None = None
    if title == "Slots in use":
        note = "Jobs that had a slot, on all heads together; one with several completions is one."
        if series:
            chart = area(title, series.jobs, series.width_s, "jobs", "tail", whole=True)
    else:
        note = (
            "Each job's tokens, spread evenly from its first to its last, by the heads' clocks. Only jobs that ended."
        )
        if series:
            chart = area(title, series.tokens_per_s, series.width_s, "tokens/s", "head")
    return _section(title, note, chart)


def _time_split(figures: BatchFigures) -> Element:
    seconds = {name: getattr(figures, f"{name}_s") for name in ("draft", "head", "link", "tail")}
    total = sum(seconds.values())
    bars = [
        Named(name, spent, f"{duration_short(spent)} · {whole_shares(spent / total)}", name)
        for name, spent in seconds.items()
        if total
    ]
    description = ", ".join(f"{bar.name} {bar.text}" for bar in bars) + "."
    note = "Seconds of all jobs added up; jobs that share a round are each charged its whole time."
    note += f" Before that they waited {duration_short(figures.queue_s)} in the queue, added up."
    return _section("Where the time went", note, named_bars("Where the time went", description, bars) if bars else None)


def _by_position(rounds: Rounds) -> Element:
    """Of the rounds whose draft reached a position, those that accepted it."""
    bars = []
    for position in range(1, len(rounds)):
        drafted = sum(sum(counts) for counts in rounds[position:])
        accepted = sum(sum(counts[position:]) for counts in rounds[position:])
        text = f"token {position}: {accepted:,} of {drafted:,} accepted ({whole_shares(accepted / drafted)})"
        bars.append(Bar(position - 0.4, position + 0.4, accepted / drafted, text))
    note = "Position in the draft: the share of the tokens drafted there that stayed."
    return _acceptance("Acceptance by position", note, bars)


def _by_length(rounds: Rounds) -> Element:
    """Of the tokens in drafts of one length, those accepted."""
    bars = []
    for length, counts in enumerate(rounds):
        drafted, accepted = length * sum(counts), sum(number * count for number, count in enumerate(counts))
        if drafted:
            share = accepted / drafted
            text = f"drafts of {length}: {whole_shares(share)} accepted, {sum(counts):,} rounds"
            bars.append(Bar(length - 0.4, length + 0.4, share, text))
    note = "Length of the draft: the share of all its tokens that stayed."
    return _acceptance("Acceptance by draft length", note, bars)


def _acceptance(title: str, note: str, bars: Sequence[Bar]) -> Element:
    if not bars:
        return _section(title, note, None)
    last = round(bars[-1].end)
    step = max(1, -(-last // 12))
    across = Axis(last + 0.5, tuple(range(step, last + 1, step)), "drafted tokens", lambda value: f"{value:.0f}")
    up = Axis(1.0, (0.0, 0.25, 0.5, 0.75, 1.0), "", whole_shares)
    return _section(title, note, columns(title, "; ".join(bar.text for bar in bars) + ".", bars, across, up, "draft"))


def _finish_reasons(reasons: dict[str, int]) -> Element:
    total = sum(reasons.values())
    bars = [Named(name, n, f"{n:,} · {whole_shares(n / total)}", "tail") for name, n in reasons.items()]
    description = ", ".join(f"{bar.name} {bar.text}" for bar in bars) + "."
    chart = named_bars("Why texts ended", description, bars) if bars else None
    return _section("Why texts ended", "Finish reasons of the jobs that succeeded.", chart)


def _distribution(title: str, ascending: array[float], note: str, color: str) -> Element:
    chart = histogram(title, ascending, color) if ascending else None
    return _section(title, f"{note} Lines: median, 90th and 99th percentile.", chart)


def _slowest(jobs: Sequence[SlowJob]) -> Element:
    rows = [
        (
            first_words(job.custom_id, 60),
            job.state,
            *(NOTHING if s is None else duration_short(s) for s in (job.latency_s, job.queue_s, job.ttft_s)),
            NOTHING if job.completion_tokens is None else f"{job.completion_tokens:,}",
            figure(job.decode_tps),
        )
        for job in jobs
    ]
    titles = ("custom_id", "state", "latency", "queued", "first token", "tokens", "tokens/s")
    table = _table(titles, rows, numbers=5) if rows else None
    return _section("Slowest jobs", "The longest from slot to last token.", table, wide=True)


def _errors(kinds: Sequence[ErrorKind]) -> Element:
    if not kinds:
        return element("section", element("h2", "Errors"), element("p", "None.", class_="dim"), class_="wide")
    rows = [(k.state, k.error_type or NOTHING, first_words(k.example, 300) or NOTHING, f"{k.number:,}") for k in kinds]
    table = _table(("end", "code", "for example", "jobs"), rows, numbers=1)
    return _section("Errors", "Jobs that did not succeed, by how they ended.", table, wide=True)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int) -> Element:
    """The last `numbers` columns hold numbers."""
    kinds = ["text"] * (len(titles) - numbers) + ["number"] * numbers
    head = element("tr", *(element("th", t, scope="col", class_=k) for t, k in zip(titles, kinds, strict=True)))
    body = [element("tr", *(element("td", v, class_=k) for v, k in zip(row, kinds, strict=True))) for row in rows]
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label="table")
