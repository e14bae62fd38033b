"""`shardq retry`: run jobs of an ended batch again."""

from __future__ import annotations

from collections.abc import Collection

import click

from cli.batches import batch_json
from cli.database import opened
from cli.durations import time_ahead
from cli.errors import CliError
from cli.follow import follow_to_end
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, note, print_json, warn
from cli.reasons import look_around, why_nothing_moves
from cli.submission import feed
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchIncomplete, BatchOpen
from storage.retries import retry_batch
from storage.states import JobState

#: what is run again if nothing is named: a cancelled job was not wanted
USUAL = (JobState.FAILED, JobState.EXPIRED)


@click.command("retry")
@click.argument("batch")
@click.option("--failed", is_flag=True, help="Jobs that failed.")
@click.option("--expired", is_flag=True, help="Jobs that expired.")
@click.option("--cancelled", is_flag=True, help="Jobs that were cancelled.")
@click.option(
    "--expires-in",
    "expires_in_s",
    type=time_ahead,
    metavar="DURATION",
    help="Jobs that have not ended by then expire. Default: as before if that lies ahead, else never.",
)
@click.option("--wait", is_flag=True, help="Show progress until the last job has ended.")
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def retry_command(
    ctx: click.Context, /, batch: str, expires_in_s: float | None, wait: bool, as_json: bool, **chosen: bool
) -> None:
    """Run jobs of an ended batch again.

    BATCH is an id, the beginning of one, or a name. Without a choice: what failed or expired. Results of jobs that
    succeeded stay. Exit status: 0 also if there is nothing to run again; with --wait 0 only if every job succeeded.

    \b
    shardq retry nightly
    shardq retry nightly --cancelled --expires-in 2h --wait
    """
    states = [state for state in JobState if chosen.get(state.value)] or list(USUAL)
    with opened() as database:
        row = get_batch(database, batch)
        number = _retry(database, row, states, expires_in_s)
        if not number:
            note(_nothing(get_batch(database, row.id), states))
        row = feed(database, row) if number else get_batch(database, row.id)
        if wait:
            ctx.exit(follow_to_end(database, row, as_json=as_json))
        if as_json:
            print_json({**batch_json(row), "retried": number})
        elif number:
            _print_retried(row, number)


def _retry(database: Database, row: BatchRow, states: Collection[JobState], expires_in_s: float | None) -> int:
    """The number of jobs that wait again. Raises CliError while the batch is open."""
    expires_at = None if expires_in_s is None else database.now() + expires_in_s
    try:
        return retry_batch(database, row.id, states, expires_at=expires_at)
    except BatchOpen as error:
        ways = f"wait for its end (`shardq status {row.id}`) or cancel it (`shardq cancel {row.id}`)"
        raise CliError(f"{error}: {ways}") from error
    except BatchIncomplete as error:
        raise CliError(f"{error}: `shardq delete {row.id}`, then submit the file again") from error


def _nothing(row: BatchRow, states: Collection[JobState]) -> str:
    """Why nothing is run again, and what else could be."""
    others = [
        (state, number)
        for state in (*USUAL, JobState.CANCELLED)
        if state not in states and (number := getattr(row.counts, state))
    ]
    hints = "".join(f"; {counted(number, 'job')} {state}: --{state}" for state, number in others)
    return f"nothing to run again: no job of {row.id} is {' or '.join(states)}{hints}"


def _print_retried(row: BatchRow, number: int) -> None:
    click.echo(row.id)
    note(f"{counted(number, 'job')} run again; `shardq status {row.id}` says how far they are")
    for reason in why_nothing_moves(look_around(), row.counts):
        warn(reason)
