"""`shardq cancel`: end a batch or one job before its text does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import click

from cli.batches import batch_json
from cli.database import opened
from cli.errors import CliError, ExitCode
from cli.follow import StallWatch, follow
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, note, print_json, warn
from cli.references import batch_or_job
from storage.batch_records import BatchRow, Counts
from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchEnded
from storage.job_records import JobRow, Stopped
from storage.jobs import get_job
from storage.states import TERMINAL_STATES, BatchStatus, JobState
from storage.stops import cancel_batch, cancel_job
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.settings import BookkeeperSettings
from tasks.stopper import Stopper, stop_once

#: seconds between two looks at a job, and between two passes of the stopper, while waiting for an end
POLL_S = 0.2
PASS_S = 1.0


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
    with opened() as database:
        ctx.exit(_cancel(database, batch_or_job, wait, as_json))


def _cancel(database: Database, reference: str, wait: bool, as_json: bool) -> ExitCode:
    target = batch_or_job(database, reference)
    stopped = _stop(database, target)
    if stopped is None:
        note(f"{target.id} was cancelled before")
    else:
        _tell_engines(database)
        stopped = _by_now(database, target, stopped)
        note(_summary(target, stopped))
    if wait:
        try:
            _wait(database, target)
        except KeyboardInterrupt:
            note(f"it goes on stopping without you: `shardq status {_batch_id(target)}`")
            return ExitCode.INTERRUPTED
    _print(database, target, stopped or Stopped(0, 0), as_json)
    return ExitCode.OK


def _stop(database: Database, target: BatchRow | JobRow) -> Stopped | None:
    """Decide in the database; None if the target was cancelled before. Raises CliError if it has ended otherwise."""
    if isinstance(target, JobRow):
        return _stop_job(database, target)
    try:
        return cancel_batch(database, target.id)
    except BatchEnded as error:
        row = get_batch(database, target.id)
        if row.status == BatchStatus.CANCELLED:
            return None
        raise CliError(f"{row.id} is {row.status}: there is nothing to cancel") from error


def _stop_job(database: Database, job: JobRow) -> Stopped | None:
    if job.state == JobState.CANCELLED:
        return None
    if job.state in TERMINAL_STATES:
        raise CliError(f"{job.id} is {job.state}: there is nothing to cancel")
    try:
        return cancel_job(database, job.id)
    except BatchEnded:
        return _stop_job(database, get_job(database, job.id))  # it ended in between


def _tell_engines(database: Database) -> None:
    """One pass of the stopper: engines hear of it, and what still stands in the queue ends."""
    try:
        stop_once(database, BookkeeperSettings())
    except TaskError as error:
        warn(f"{error}; it stands in the database, and engines will hear of it from the bookkeeper")


def _by_now(database: Database, target: BatchRow | JobRow, stopped: Stopped) -> Stopped:
    """What has ended and what is still stopping after that pass."""
    if isinstance(target, JobRow):
        still = int(get_job(database, target.id).state not in TERMINAL_STATES)
    else:
        still = get_batch(database, target.id).counts.num_open
    return Stopped(stopped.ended + max(0, stopped.stopping - still), still)


def _summary(target: BatchRow | JobRow, stopped: Stopped) -> str:
    at_once = f"{counted(stopped.ended, 'job')} cancelled at once"
    if not stopped.stopping:
        return at_once
    hint = f"`shardq status {_batch_id(target)}` says when {'it has' if stopped.stopping == 1 else 'they have'} ended"
    if not stopped.ended:
        return f"{counted(stopped.stopping, 'job')} still stopping; {hint}"
    return f"{at_once}, {stopped.stopping} still stopping; {hint}"


def _batch_id(target: BatchRow | JobRow) -> str:
    return target.batch_id if isinstance(target, JobRow) else target.id


def _wait(database: Database, target: BatchRow | JobRow) -> None:
    """Wait for the end. Passes of the stopper meanwhile, so that it comes without a bookkeeper, too."""
    client = connect(BookkeeperSettings())
    try:
        passes = _Passes(Stopper(database, client))
        if isinstance(target, JobRow):
            _wait_for_job(database, target.id, passes)
        else:
            follow(database, get_batch(database, target.id), passes)
    finally:
        client.close()


class _Passes:
    """The stopper's passes while one waits: at most one a second."""

    def __init__(self, stopper: Stopper, clock: Callable[[], float] = time.monotonic) -> None:
        self._stopper = stopper
        self._clock = clock
        self._due = clock()

    def __call__(self) -> None:
        if self._clock() >= self._due:
            self._due = self._clock() + PASS_S
            # Told when the cancel was decided; should it last, the stall watch tells again.
            with suppress(TaskError), translated():
                self._stopper.turn()


def _wait_for_job(database: Database, job_id: str, passes: _Passes) -> None:
    stall = StallWatch(note)
    while (job := get_job(database, job_id)).state not in TERMINAL_STATES:
        passes()
        stall(Counts(**{job.state: 1}))
        time.sleep(POLL_S)


def _print(database: Database, target: BatchRow | JobRow, stopped: Stopped, as_json: bool) -> None:
    if isinstance(target, JobRow):
        job = get_job(database, target.id)
        value = {"object": "job", "id": job.id, "batch_id": job.batch_id, "custom_id": job.custom_id}
        shown = {**value, "status": job.state, "stopped": asdict(stopped)}
        text = f"{job.id} {job.state if job.state in TERMINAL_STATES else 'cancelling'}"
    else:
        row = get_batch(database, target.id)
        shown = {**batch_json(row), "stopped": asdict(stopped)}
        text = f"{row.id} {row.status}"
    if as_json:
        print_json(shown)
    else:
        click.echo(text)
