"""Commands that say where batches stand: `status` and `list`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from cli.database import exit_code, opened
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import NOTHING, duration, figure, moment, note, percent, print_json, print_table, state, warn
from cli.reasons import System, look_around, why_nothing_moves
from storage.batches import get_batch, list_batches
from storage.figures import batch_figures
from storage.records import BatchFigures, BatchRow
from storage.states import TERMINAL_STATUSES, BatchStatus

#: batches that `status` without an argument shows
RECENT = 10


@click.command("status")
@click.argument("batch", required=False)
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def status_command(ctx: click.Context, batch: str | None, as_json: bool) -> None:
    """How far a batch is, or how the whole system is.

    BATCH is an id, the beginning of one, or a name. Exit status: 0 if every job succeeded, 3 if one did not,
    4 while jobs are open.

    \b
    shardq status
    shardq status nightly --json
    """
    if batch is None:
        _show_system(as_json)
        return
    with opened() as database:
        row = get_batch(database, batch)
        figures = batch_figures(database, row.id)
    if as_json:
        print_json({**batch_json(row), "figures": figures_json(figures)})
    else:
        print_batch(row, figures)
        if row.counts.num_open:
            for reason in why_nothing_moves(look_around(), row.counts):
                warn(reason)
    ctx.exit(exit_code(row.counts))


@click.command("list")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="How many batches.")
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    type=click.Choice([status.value for status in BatchStatus]),
    help="Only batches in this state, as validating, in_progress, completed; may be given several times.",
)
@json_option
@database_option
def list_command(limit: int, states: tuple[str, ...], as_json: bool) -> None:
    """The batches, newest first.

    \b
    shardq list
    shardq list --state in_progress --json
    """
    with opened() as database:
        rows = list_batches(database, limit=limit, statuses=[BatchStatus(name) for name in states])
    if as_json:
        print_json([batch_json(row) for row in rows])
    elif rows:
        print_batches(rows)
    else:
        note("no batch yet: `shardq submit FILE` queues one")


def print_batches(rows: list[BatchRow]) -> None:
    """Batches as a table."""
    print_table(
        ["BATCH", "STATE", "JOBS", "DONE", "FAILED", "AGE", "NAME"],
        [
            (
                row.id,
                state(row.status),
                row.counts.total,
                percent(row.counts.num_ended, row.counts.total),
                row.counts.num_ended - row.counts.completed,
                duration(time.time() - row.created_at),
                row.name or NOTHING,
            )
            for row in rows
        ],
        numbers={"JOBS", "DONE", "FAILED", "AGE"},
    )


def print_batch(row: BatchRow, figures: BatchFigures) -> None:
    """One batch with its counts and figures."""
    counts = row.counts
    jobs = ", ".join(f"{number} {name}" for name, number in asdict(counts).items() if number)
    lines = {
        "batch": row.id + (f" ({row.name})" if row.name else ""),
        "state": row.status.value,
        "jobs": f"{counts.total}: {jobs}" if jobs else "0",
        "skipped lines": str(row.num_invalid_lines) if row.num_invalid_lines else None,
        "created": moment(row.created_at),
        "wall time": duration(figures.wall_s),
        "tokens": f"{figures.prompt_tokens:,} prompt, {figures.completion_tokens:,} completion",
        "speed": f"{figure(figures.batch_tps)} tokens/s in all, {figure(figures.median_decode_tps)} per job (median)",
        "rounds": f"{figures.rounds:,}: {figure(figures.tokens_per_round, 2)} tokens per round, "
        f"{percent(figures.accepted, figures.drafted)} of drafted tokens accepted",
        "first token": f"after {figure(figures.mean_ttft_s, 2)} s (mean)",
    }
    for name, text in lines.items():
        if text is not None:
            click.echo(f"{name:<14} {text}")


def batch_json(row: BatchRow) -> dict[str, Any]:
    """A batch in the shape of an OpenAI Batch object, with what is ours beside it."""
    values = asdict(row)
    counts = values.pop("counts")
    not_done = row.counts.num_ended - row.counts.completed
    return {
        "object": "batch",
        **values,
        "request_counts": {
            "total": row.counts.total,
            "completed": row.counts.completed,
            "failed": not_done,
        },
        "job_counts": counts,
        "ended": row.status in TERMINAL_STATUSES,
    }


def figures_json(figures: BatchFigures) -> dict[str, Any]:
    """A batch's figures without the counts, which the batch has."""
    values = asdict(figures)
    del values["counts"]
    return values


def _show_system(as_json: bool) -> None:
    with opened() as database:
        rows = list_batches(database, limit=RECENT)
    system = look_around()
    if as_json:
        print_json({"batches": [batch_json(row) for row in rows], **system.to_json()})
        return
    _print_system(system)
    if rows:
        print_batches(rows)
    open_rows = [row for row in rows if row.counts.num_open]
    for reason in why_nothing_moves(system, open_rows[0].counts) if open_rows else []:
        warn(reason)


def _print_system(system: System) -> None:
    if system.problem:
        warn(system.problem)
        return
    if not system.heads:
        click.echo("no head is alive")
        return
    print_table(
        ["HEAD", "MODEL", "STATE", "SLOTS", "RUNNING", "TOKENS/S", "UP"],
        [
            (
                head.head_id,
                head.model,
                state("running" if head.consuming else "waiting for a tail"),
                head.slots,
                head.running,
                figure(head.tokens_per_s),
                duration(time.time() - head.started_at),
            )
            for head in system.heads
        ],
        numbers={"SLOTS", "RUNNING", "TOKENS/S", "UP"},
    )
