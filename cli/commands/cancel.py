"""`shardq cancel`: end a batch or one job before its text does."""

from __future__ import annotations

from dataclasses import asdict

import click

from cli.batches import batch_json
from cli.client.batch import Batch
from cli.client.client import Client
from cli.errors import ExitCode
from cli.interruption import interruptible
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, note, print_json
from cli.terminal import opened_client
from storage.job_records import JobRow, Stopped
from storage.states import TERMINAL_STATES, BatchStatus


@click.command("cancel")
@click.argument("batch_or_job", metavar="BATCH|JOB")
@click.option("--wait", is_flag=True, help="Return only once everything has stopped.")
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def cancel_command(ctx: click.Context, batch_or_job: str, wait: bool, as_json: bool) -> None:
    """Stop a batch, or one job of it.

    BATCH is an id, the beginning of one, or a name. JOB is BATCH-LINE. What waits is cancelled at once; running
    jobs stop within two rounds and keep the text they have. Finished results stay. Cancelling again does no harm.

    \b
    shardq cancel nightly
    shardq cancel nightly-17 --wait
    shardq retry nightly --cancelled           takes up what was cancelled
    """
    with opened_client() as client:
        ctx.exit(_cancel(client, batch_or_job, wait, as_json))


def _cancel(client: Client, reference: str, wait: bool, as_json: bool) -> ExitCode:
    target = client.find(reference)
    with interruptible(lambda: _left(target)):
        stopped = client.cancel(target)
        note(f"{target.id} was cancelled before" if stopped is None else _summary(target, stopped))
        if wait:
            client.wait_for_stop(target)
        _print(client, target, stopped or Stopped(0, 0), as_json)
    return ExitCode.OK


def _left(target: Batch | JobRow) -> str:
    """What an interrupted cancelling leaves behind."""
    if isinstance(target, Batch) and target.refresh().status == BatchStatus.IN_PROGRESS:
        return f"{target.id} was not cancelled"
    return f"what was decided stands, and stops without you: `shardq status {_batch_id(target)}`"


def _summary(target: Batch | JobRow, stopped: Stopped) -> str:
    at_once = f"{counted(stopped.ended, 'job')} cancelled at once"
    if not stopped.stopping:
        return at_once
    hint = f"`shardq status {_batch_id(target)}` says when {'it has' if stopped.stopping == 1 else 'they have'} ended"
    if not stopped.ended:
        return f"{counted(stopped.stopping, 'job')} still stopping; {hint}"
    return f"{at_once}, {stopped.stopping} still stopping; {hint}"


def _batch_id(target: Batch | JobRow) -> str:
    return target.batch_id if isinstance(target, JobRow) else target.id


def _print(client: Client, target: Batch | JobRow, stopped: Stopped, as_json: bool) -> None:
    if isinstance(target, JobRow):
        job = client.job(target.id)
        value = {"object": "job", "id": job.id, "batch_id": job.batch_id, "custom_id": job.custom_id}
        shown = {**value, "status": job.state, "stopped": asdict(stopped)}
        text = f"{job.id} {job.state if job.state in TERMINAL_STATES else 'cancelling'}"
    else:
        row = target.refresh().row
        shown = {**batch_json(row), "stopped": asdict(stopped)}
        text = f"{row.id} {row.status}"
    if as_json:
        print_json(shown)
    else:
        click.echo(text)
