"""`shardq retry`: run jobs of an ended batch again."""

from __future__ import annotations

import click

from cli.batches import batch_json
from cli.client.batch import Batch
from cli.client.transport import RetryOrder
from cli.durations import time_ahead
from cli.follow import follow_to_end
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, note, print_json, warn
from cli.terminal import opened_client
from storage.states import JobState


@click.command("retry")
@click.argument("batch")
@click.option("--failed", is_flag=True, help="Jobs that failed.")
@click.option("--expired", is_flag=True, help="Jobs that expired.")
@click.option("--cancelled", is_flag=True, help="Jobs that were cancelled.")
@click.option(
    "--code",
    "codes",
    multiple=True,
    metavar="CODE",
    help="Jobs that ended with this error code; may be given several times.",
)
@click.option(
    "--job", "jobs", multiple=True, metavar="JOB", help="This job, by id or custom_id; may be given several times."
)
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
    ctx: click.Context,
    /,
    batch: str,
    codes: tuple[str, ...],
    jobs: tuple[str, ...],
    expires_in_s: float | None,
    wait: bool,
    as_json: bool,
    **chosen: bool,
) -> None:
    """Run jobs of an ended batch again.

    BATCH is an id, the beginning of one, or a name. Without a choice: what failed or expired. Jobs whose request was
    the cause, as a prompt that is too long, run again only if their code or the job itself is named. Results of jobs
    that succeeded stay. Exit status: 0 also if there is nothing to run again; with --wait 0 only if every job
    succeeded.

    \b
    shardq retry nightly
    shardq retry nightly --code too_many_tries --code out_of_memory
    shardq retry nightly --job nightly-17 --job q3
    shardq retry nightly --cancelled --expires-in 2h --wait
    """
    states = frozenset(state for state in JobState if chosen.get(state.value))
    with opened_client() as client:
        found = client.batch(batch)
        order = RetryOrder(states, frozenset(codes), jobs, expires_in_s)
        with found.left_alone():
            retried = found.run_again(order)
            if wait:
                ctx.exit(follow_to_end(found, as_json=as_json))
            if as_json:
                print_json({**batch_json(found.row), "retried": retried.number})
            elif retried.number:
                _print_retried(found, retried.number)


def _print_retried(batch: Batch, number: int) -> None:
    click.echo(batch.id)
    note(f"{counted(number, 'job')} run again; `shardq status {batch.id}` says how far they are")
    for reason in batch.obstacles():
        warn(reason)
