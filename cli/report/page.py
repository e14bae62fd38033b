"""The report as one page: nothing in it is fetched, no script runs."""

from __future__ import annotations

from cli.output import counted, duration, figure, moment, percent, size
from cli.report.charts.element import Element, element
from cli.report.sections import sections
from cli.report.style import STYLE
from storage.batch_records import BatchFigures, BatchRow
from storage.series import BatchSeries

#: a browser refuses whatever the page might still ask for
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(row: BatchRow, figures: BatchFigures, series: BatchSeries, now: float) -> str:
    """HTML; `now` is the moment that it describes. Whatever users wrote is escaped."""
    name = row.name or row.id
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{name} · shardq"),
        element("style", STYLE),
    )
    body = element(
        "main",
        element("h1", name),
        element("p", _standing(row, now), class_="dim"),
        _headline(figures),
        element("div", *sections(figures, series), class_="cards"),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _standing(row: BatchRow, now: float) -> str:
    counts = row.counts
    left = f" · {counted(counts.num_open, 'job')} still open" if counts.num_open else ""
    key = "" if row.name is None else f"{row.id} · "
    return f"{key}{row.status}{left} · submitted {moment(row.created_at)} · as of {moment(now)}"


def _headline(figures: BatchFigures) -> Element:
    counts = figures.counts
    shown = {
        "succeeded": f"{counts.completed:,} of {counts.total:,}",
        "did not succeed": f"{counts.num_ended - counts.completed:,}",
        "took over a result": f"{figures.reused:,}",
        "wall time": duration(figures.wall_s),
        "completion tokens": f"{figures.completion_tokens:,}",
        "tokens/s, the batch": figure(figures.batch_tps),
        "tokens/s, median job": figure(figures.median_decode_tps),
        "accepted": percent(figures.accepted, figures.drafted),
        "tokens per round": figure(figures.tokens_per_round, 2),
        "bytes up": size(figures.wire_bytes_up),
        "bytes down": size(figures.wire_bytes_down),
    }
    items = [element("div", element("dt", name), element("dd", value)) for name, value in shown.items()]
    return element("dl", *items, class_="figures")
