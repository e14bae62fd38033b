"""`shardq stats`: how the figures of a batch spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from cli.batches import figures_json, not_ended, states
from cli.database import opened
from cli.options import database_option, json_option
from cli.output import duration, figure, percent, print_json, print_table, print_values, size, warn
from cli.where_time_went import TimeSpent, print_time_spent
from storage.batch_records import BatchFigures, BatchRow
from storage.batches import get_batch
from storage.figures import batch_figures
from storage.percentiles import Distribution, distribution

#: figure → (what people call it, digits)
_NAMES = {
    "ttft_s": ("first token, s", 3),
    "decode_tps": ("decode tokens/s", 1),
    "e2e_tps": ("e2e tokens/s", 1),
    "e2e_s": ("start to end, s", 2),
    "queue_s": ("queue, s", 2),
    "acceptance": ("acceptance", 2),
    "tokens_per_round": ("tokens per round", 2),
}


@click.command("stats")
@click.argument("batch")
@json_option
@database_option
def stats_command(batch: str, as_json: bool) -> None:
    """How a batch's figures spread, where its time went.

    BATCH is an id, the beginning of one, or a name. Of 100 jobs, 50 have at most the figure under P50, 90 that under
    P90, 99 that under P99. Jobs that took over a stored result count only among the finish reasons.

    \b
    shardq stats nightly
    shardq stats nightly --json
    """
    with opened() as database:
        row = get_batch(database, batch)
        figures = batch_figures(database, row.id)
        spread = distribution(database, row.id)
    if as_json:
        print_json(stats_json(row, figures, spread))
    else:
        _print(row, figures, spread)
    if row.counts.num_open:
        warn(not_ended(row.counts))


def time_spent(figures: BatchFigures, spread: Distribution) -> TimeSpent:
    """Of all jobs of a batch together."""
    return TimeSpent(
        queue_s=figures.queue_s,
        draft_s=figures.draft_s,
        head_s=figures.head_s,
        link_s=figures.link_s,
        tail_s=figures.tail_s,
        other_s=spread.other_s,
    )


def stats_json(row: BatchRow, figures: BatchFigures, spread: Distribution) -> dict[str, Any]:
    """What `stats` shows as plain JSON values."""
    return {
        "id": row.id,
        "name": row.name,
        "status": row.status,
        "job_counts": asdict(row.counts),
        "figures": figures_json(figures),
        "percentiles": {name: asdict(values) for name, values in spread.percentiles.items()},
        "time_spent": time_spent(figures, spread).to_json(),
        "finish_reasons": dict(spread.finish_reasons),
        "errors": dict(spread.errors),
    }


def _print(row: BatchRow, figures: BatchFigures, spread: Distribution) -> None:
    print_values(_lines(row, figures, spread))
    if spread.percentiles:
        click.echo()
        print_percentiles(spread)
    spent = time_spent(figures, spread)
    if spent.total_s:
        click.echo()
        print_time_spent(spent)


def _lines(row: BatchRow, figures: BatchFigures, spread: Distribution) -> dict[str, str]:
    lines = {
        "batch": row.id + (f" ({row.name})" if row.name else ""),
        "jobs": states(row.counts),
        "wall time": duration(figures.wall_s),
        "tokens": f"{figures.prompt_tokens:,} prompt ({figures.cached_tokens:,} cached), "
        f"{figures.completion_tokens:,} completion",
        "speed": f"{figure(figures.batch_tps)} tokens/s in all",
        "rounds": f"{figures.rounds:,}: {figure(figures.tokens_per_round, 2)} tokens per round, "
        f"{percent(figures.accepted, figures.drafted)} of {figures.drafted:,} drafted tokens accepted",
        "wire": f"{size(figures.wire_bytes_up)} up, {size(figures.wire_bytes_down)} down",
        "texts end by": _listed(spread.finish_reasons),
        "errors": _listed(spread.errors),
        "reused": f"{figures.reused:,} stored results of earlier jobs" if figures.reused else "",
    }
    return {name: text for name, text in lines.items() if text}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())


def print_percentiles(spread: Distribution) -> None:
    """A table of the figures that were measured."""
    found = {name: values for name, values in spread.percentiles.items() if name in _NAMES}
    print_table(
        ["FIGURE", "P50", "P90", "P99", "JOBS"],
        [
            (title, *(figure(value, digits) for value in (values.p50, values.p90, values.p99)), values.num_jobs)
            for name, values in found.items()
            for title, digits in [_NAMES[name]]
        ],
        numbers={"P50", "P90", "P99", "JOBS"},
    )
