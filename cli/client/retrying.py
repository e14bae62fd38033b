"""Jobs of an ended batch that run again: which ones are meant, and which would only fail again."""

from __future__ import annotations

from cli.client.references import batch_or_job
from cli.client.transport import Retried, RetryOrder
from cli.errors import Refused
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
