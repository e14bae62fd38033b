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
from cli.references import batch_or_job
from cli.submission import feed
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchIncomplete, BatchOpen
from storage.job_records import JobRow
from storage.jobs import get_job
from storage.retries import RetryChoice, count_failures, find_jobs, retry_batch
from storage.states import RETRYABLE_STATES, TERMINAL_STATES, JobState
from tasks.generation import REQUEST_FAILURES

#: what is run again if nothing is named: a cancelled job was not wanted
USUAL = (JobState.FAILED, JobState.EXPIRED)


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
    with opened() as database:
        row = get_batch(database, batch)
        choice = _choice(states, frozenset(codes), _job_ids(database, row, jobs))
        number = _retry(database, row, choice, expires_in_s)
        if not number:
            note(_nothing(get_batch(database, row.id), choice))
        if left_out := count_failures(database, row.id, choice.but_codes):
            note(_left_out(left_out))
        row = feed(database, row) if number else get_batch(database, row.id)
        if wait:
            ctx.exit(follow_to_end(database, row, as_json=as_json))
        if as_json:
            print_json({**batch_json(row), "retried": number})
        elif number:
            _print_retried(row, number)


def _choice(states: frozenset[JobState], codes: frozenset[str], job_ids: frozenset[str]) -> RetryChoice:
    """Whoever names a code or a job means it, whatever its state."""
    named = bool(codes or job_ids)
    usual = RETRYABLE_STATES if named else frozenset(USUAL)
    return RetryChoice(states or usual, codes, frozenset() if named else frozenset(REQUEST_FAILURES), job_ids)


def _job_ids(database: Database, row: BatchRow, names: Collection[str]) -> frozenset[str]:
    """The ids of the named jobs. Raises CliError for one that is no job of the batch or cannot run again."""
    by_custom_id = find_jobs(database, row.id, names)
    return frozenset(_retryable(database, row, name, by_custom_id.get(name)) for name in names)


def _retryable(database: Database, row: BatchRow, name: str, job_id: str | None) -> str:
    job = get_job(database, job_id) if job_id else batch_or_job(database, name)
    if not isinstance(job, JobRow) or job.batch_id != row.id:
        raise CliError(f"--job {name!r} is no job of {row.id}: expected a custom_id of its file, or {row.id}-LINE")
    if job.state in TERMINAL_STATES - RETRYABLE_STATES:
        raise CliError(f"--job {name!r} is {job.state}: only a job that failed, expired or was cancelled runs again")
    return job.id


def _retry(database: Database, row: BatchRow, choice: RetryChoice, expires_in_s: float | None) -> int:
    """The number of jobs that wait again. Raises CliError while the batch is open."""
    expires_at = None if expires_in_s is None else database.now() + expires_in_s
    try:
        return retry_batch(database, row.id, choice, expires_at=expires_at)
    except BatchOpen as error:
        ways = f"wait for its end (`shardq status {row.id}`) or cancel it (`shardq cancel {row.id}`)"
        raise CliError(f"{error}: {ways}") from error
    except BatchIncomplete as error:
        raise CliError(f"{error}: `shardq delete {row.id}`, then submit the file again") from error


def _nothing(row: BatchRow, choice: RetryChoice) -> str:
    """Why nothing is run again, and what else could be."""
    others = [
        (state, number)
        for state in (*USUAL, JobState.CANCELLED)
        if state not in choice.states and (number := getattr(row.counts, state))
    ]
    hints = "".join(f"; {counted(number, 'job')} {state}: --{state}" for state, number in others)
    states = " or ".join(state for state in JobState if state in choice.states)
    codes = f" with {' or '.join(sorted(choice.codes))}" if choice.codes else ""
    return f"nothing to run again: no job of {row.id} is {states}{codes}{hints}"


def _left_out(counts: dict[str, int]) -> str:
    codes = ", ".join(f"{counted(number, 'job')} with {code}" for code, number in sorted(counts.items()))
    ways = " ".join(f"--code {code}" for code in sorted(counts))
    return f"left out, since they would fail again as they are: {codes} ({ways} runs them all the same)"


def _print_retried(row: BatchRow, number: int) -> None:
    click.echo(row.id)
    note(f"{counted(number, 'job')} run again; `shardq status {row.id}` says how far they are")
    for reason in why_nothing_moves(look_around(), row.counts):
        warn(reason)
