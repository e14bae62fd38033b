"""Commands that say where batches stand: `status` and `list`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from cli.database import exit_code, opened
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import NOTHING, counted, duration, figure, moment, note, percent, print_json, print_table, state, warn
from cli.reasons import System, look_around, why_nothing_moves
from storage.batches import get_batch, list_batches
from storage.database import Database
from storage.figures import batch_figures
from storage.jobs import open_models
from storage.records import DEFAULT_PRIORITY, BatchFigures, BatchRow
from storage.states import TERMINAL_STATUSES, BatchStatus
from tasks.durations import shortest

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

    BATCH is an id, the beginning of one, or a name. Exit status: 0 if every job succeeded, 3 if one failed, was
    cancelled or expired, 4 while jobs are open.

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
        reasons = _reasons(database, row, look_around) if row.counts.num_open else []
    if as_json:
        print_json({**batch_json(row, figures), "obstacles": reasons})
    else:
        print_batch(row, figures)
        for reason in reasons:
            warn(reason)
    ctx.exit(exit_code(row.counts))


def _reasons(database: Database, row: BatchRow, system: Callable[[], System]) -> list[str]:
    """Why an open batch does not move."""
    if row.status == BatchStatus.VALIDATING:
        return []
    stopping = row.status == BatchStatus.CANCELLING
    models = open_models(database, row.id)
    return list(why_nothing_moves(system(), row.counts, stopping=stopping, models=models))


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
        ["BATCH", "STATE", "JOBS", "DONE", "FAILED", "STOPPED", "AGE", "NAME"],
        [
            (
                row.id,
                state(row.status),
                row.counts.total,
                percent(row.counts.num_ended, row.counts.total),
                row.counts.failed,
                row.counts.cancelled + row.counts.expired,
                duration(time.time() - row.created_at),
                row.name or NOTHING,
            )
            for row in rows
        ],
        numbers={"JOBS", "DONE", "FAILED", "STOPPED", "AGE"},
    )


def print_batch(row: BatchRow, figures: BatchFigures) -> None:
    """One batch with its counts and figures."""
    counts = row.counts
    jobs = ", ".join(f"{number} {name}" for name, number in asdict(counts).items() if number)
    lines = {
        "batch": row.id + (f" ({row.name})" if row.name else ""),
        "state": f"{row.status}{_what_that_means(row)}",
        "jobs": f"{counts.total}: {jobs}" if jobs else "0",
        "skipped lines": str(row.num_invalid_lines) if row.num_invalid_lines else None,
        "priority": str(row.priority) if row.priority != DEFAULT_PRIORITY else None,
        "reused": f"{figures.reused} stored results of earlier jobs" if figures.reused else None,
        "created": moment(row.created_at),
        "expires": _expiry(row),
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


def _what_that_means(row: BatchRow) -> str:
    """What the status alone does not say. `completed` only says that every job has ended."""
    counts = row.counts
    if row.status == BatchStatus.VALIDATING:
        return ": its submission goes on or was cut off (submit it again, or `shardq delete` it)"
    if row.status == BatchStatus.COMPLETED and not counts.completed:
        return ": not one job succeeded"
    if row.status == BatchStatus.COMPLETED and counts.completed < counts.total:
        return f": {counts.total - counts.completed} of {counted(counts.total, 'job')} did not succeed"
    if row.status == BatchStatus.CANCELLING:
        return f": {counted(counts.num_open, 'job')} still stopping"
    return ""


def _expiry(row: BatchRow) -> str | None:
    if row.expires_at is None:
        return None
    left = row.expires_at - time.time()
    is_open = row.status not in TERMINAL_STATUSES
    return moment(row.expires_at) + (f", in {duration(left)}" if is_open and left > 0 else "")


#: a batch's moments, as OpenAI's Batch object names them
_TIMESTAMPS = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)


def batch_json(row: BatchRow, figures: BatchFigures | None = None) -> dict[str, Any]:
    """A batch as an OpenAI Batch object (times in whole Unix seconds), with what is ours beside it."""
    counts = row.counts
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": row.parameters.get("model"),
        "errors": None,
        "input_file_id": f"file-{row.file_hash}",
        "completion_window": shortest(row.expires_at - row.created_at) if row.expires_at else None,
        "status": row.status,
        **_files(row),
        **{name: _whole(getattr(row, name)) for name in _TIMESTAMPS},
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.num_ended - counts.completed,
        },
        "usage": usage_json(figures) if figures else None,
        "metadata": {"name": row.name} if row.name else None,
        "name": row.name,
        "file_hash": row.file_hash,
        "parameters": row.parameters,
        "priority": row.priority,
        "num_invalid_lines": row.num_invalid_lines,
        "job_counts": asdict(counts),
        "ended": row.status in TERMINAL_STATUSES,
        **({"figures": figures_json(figures)} if figures else {}),
    }


def _files(row: BatchRow) -> dict[str, str | None]:
    """Names of the files that `shardq results` writes, once there is something for them."""
    counts, ended = row.counts, row.status in TERMINAL_STATUSES
    has_errors = counts.num_ended > counts.completed
    return {
        "output_file_id": f"file-{row.id}-output" if ended and counts.completed else None,
        "error_file_id": f"file-{row.id}-errors" if ended and has_errors else None,
    }


def _whole(timestamp: float | None) -> int | None:
    return None if timestamp is None else int(timestamp)


def usage_json(figures: BatchFigures) -> dict[str, Any]:
    """Tokens of a batch in the shape of OpenAI's `usage`."""
    return {
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": {"cached_tokens": figures.cached_tokens},
        "output_tokens": figures.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": figures.prompt_tokens + figures.completion_tokens,
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
        open_rows = [row for row in rows if row.counts.num_open]
        found = [reason for row in open_rows for reason in _reasons(database, row, lambda: system)]
    reasons = list(dict.fromkeys(found))
    if as_json:
        print_json({"batches": [batch_json(row) for row in rows], **system.to_json(), "obstacles": reasons})
        return
    _print_system(system)
    if rows:
        print_batches(rows)
    for reason in reasons if not system.problem else []:
        warn(reason)


def _print_system(system: System) -> None:
    if system.problem:
        warn(system.problem)
        return
    if not system.heads:
        click.echo("no head is alive")
        return
    print_table(
        ["HEAD", "MODEL", "PART", "STATE", "SLOTS", "RUNNING", "TOKENS/S", "UP"],
        [
            (
                head.head_id,
                head.model,
                "whole" if head.whole else "half",
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
