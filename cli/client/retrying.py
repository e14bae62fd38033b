"""Jobs of an ended batch that run again: which ones are meant, and which would only fail again."""

from __future__ import annotations

from collections.abc import Iterator

from cli.client.references import batch_or_job
from cli.client.transport import Retried, RetryOrder
from cli.errors import Refused
from cli.output import counted
from storage.batch_records import BatchRow
from storage.database import Database
from storage.errors import BatchIncomplete, BatchOpen
from storage.job_records import JobRow
from storage.jobs import get_job
from storage.retries import RetryChoice, count_failures, find_jobs, retry_batch
from storage.states import RETRYABLE_STATES, TERMINAL_STATES, JobState
from tasks.generation import REQUEST_FAILURES

#: what is run again if nothing is named: a cancelled job was not wanted
_USUAL = frozenset([JobState.FAILED, JobState.EXPIRED])


def run_again(database: Database, batch: BatchRow, order: RetryOrder) -> Retried:
    """Let the jobs that are meant wait again. Raises Refused while the batch is open, and for what is no job of it."""
    choice = _choice(order, frozenset(_job_id(database, batch, name) for name in order.jobs))
    expires_at = None if order.expires_in_s is None else database.now() + order.expires_in_s
    try:
        number = retry_batch(database, batch.id, choice, expires_at=expires_at)
    except BatchOpen as error:
        ways = f"wait for its end (`shardq status {batch.id}`) or cancel it (`shardq cancel {batch.id}`)"
        raise Refused(f"{error}: {ways}") from error
    except BatchIncomplete as error:
        raise Refused(f"{error}: `shardq delete {batch.id}`, then submit the file again") from error
    return Retried(number, choice.states, count_failures(database, batch.id, choice.but_codes))


def remarks(batch: BatchRow, order: RetryOrder, retried: Retried) -> Iterator[str]:
    """Why nothing runs again, and what else could; what was left out of the rest."""
    if not retried.number:
        yield _nothing(batch, order, retried)
    if counts := retried.left_out:
        codes = ", ".join(f"{counted(number, 'job')} with {code}" for code, number in sorted(counts.items()))
        ways = " ".join(f"--code {code}" for code in sorted(counts))
        yield f"left out, since they would fail again as they are: {codes} ({ways} runs them all the same)"


def _nothing(batch: BatchRow, order: RetryOrder, retried: Retried) -> str:
    others = [
        (state, number)
        for state in (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED)
        if state not in retried.states and (number := getattr(batch.counts, state))
    ]
    hints = "".join(f"; {counted(number, 'job')} {state}: --{state}" for state, number in others)
    states = " or ".join(state for state in JobState if state in retried.states)
    codes = f" with {' or '.join(sorted(order.codes))}" if order.codes else ""
    return f"nothing to run again: no job of {batch.id} is {states}{codes}{hints}"


def _choice(order: RetryOrder, job_ids: frozenset[str]) -> RetryChoice:
    """Whoever names a code or a job means it, whatever its state."""
    named = bool(order.codes or job_ids)
    usual = RETRYABLE_STATES if named else _USUAL
    return RetryChoice(
        order.states or usual, order.codes, frozenset() if named else frozenset(REQUEST_FAILURES), job_ids
    )


def _job_id(database: Database, batch: BatchRow, name: str) -> str:
    """The id of the named job. Raises Refused for one that is no job of the batch or cannot run again."""
    job_id = find_jobs(database, batch.id, [name]).get(name)
    job = get_job(database, job_id) if job_id else batch_or_job(database, name)
    if not isinstance(job, JobRow) or job.batch_id != batch.id:
        raise Refused(f"--job {name!r} is no job of {batch.id}: expected a custom_id of its file, or {batch.id}-LINE")
    if job.state in TERMINAL_STATES - RETRYABLE_STATES:
        raise Refused(f"--job {name!r} is {job.state}: only a job that failed, expired or was cancelled runs again")
    return job.id
