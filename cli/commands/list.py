"""`shardq list`: the batches."""

from __future__ import annotations

import click

from cli.batches import batch_json, print_batches
from cli.options import database_option, json_option
from cli.output import note, print_json
from cli.terminal import opened_client
from storage.states import BatchStatus


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
    with opened_client() as client:
        found = client.batches(limit=limit, statuses=[BatchStatus(name) for name in states])
        rows = [batch.row for batch in found]
    if as_json:
        print_json([batch_json(row) for row in rows])
    elif rows:
        print_batches(rows)
    else:
        note("no batch yet: `shardq submit FILE` queues one")
