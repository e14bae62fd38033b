"""`shardq status`: how far a batch is, how the system is, and why nothing moves."""

from __future__ import annotations

import time

import click

from cli.batches import batch_json, print_batch, print_batches
from cli.database import exit_code
from cli.follow import follow_to_end
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import duration, figure, print_json, print_table, state, warn
from cli.reasons import System, standing_still
from cli.terminal import opened_client
from tasks.heads import HeadInfo

#: batches that `status` without an argument shows
RECENT = 10


@click.command("status")
@click.argument("batch", required=False)
@click.option("--watch", is_flag=True, help="Show a batch's progress until its last job has ended.")
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def status_command(ctx: click.Context, batch: str | None, watch: bool, as_json: bool) -> None:
    """How far a batch is, or how the whole system is.

    BATCH is an id, the beginning of one, or a name. With --watch it is as `submit --wait` shows it, from whatever
    terminal. Exit status: 0 if every job succeeded, 3 if one failed, was cancelled or expired, 4 while jobs are open.

    \b
    shardq status
    shardq status nightly --json
    shardq status nightly --watch
    """
    if batch is None:
        if watch:
            raise click.UsageError("--watch is for one BATCH: `shardq top` shows the system, live.", ctx)
        _show_system(as_json)
        return
    with opened_client() as client:
        found = client.batch(batch)
        if watch:
            ctx.exit(follow_to_end(found, as_json=as_json))
        figures = found.figures()
        reasons = found.obstacles()
    if as_json:
        print_json({**batch_json(found.row, figures), "obstacles": reasons})
    else:
        print_batch(found.row, figures)
        for reason in reasons:
            warn(reason)
    ctx.exit(exit_code(found.counts))


def _show_system(as_json: bool) -> None:
    with opened_client() as client:
        batches = client.batches(limit=RECENT)
        system = client.system()
        of_batches = [reason for batch in batches for reason in batch.obstacles(system)]
        reasons = list(dict.fromkeys([*of_batches, *standing_still(system.heads, system.versions, system.tails)]))
    rows = [batch.row for batch in batches]
    if as_json:
        print_json({"batches": [batch_json(row) for row in rows], **system.to_json(), "obstacles": reasons})
        return
    _print_system(system)
    if rows:
        print_batches(rows)
    for reason in reasons if not system.problem else []:
        warn(reason)


def _state(head: HeadInfo) -> str:
    if head.consuming:
        return "running"
    return "waiting for a tail" if head.slots else "starting"


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
                state(_state(head)),
                head.slots,
                head.running,
                figure(head.tokens_per_s),
                duration(time.time() - head.started_at),
            )
            for head in system.heads
        ],
        numbers={"SLOTS", "RUNNING", "TOKENS/S", "UP"},
    )
