"""The decision that a batch or job ends before its text does."""

from __future__ import annotations

from cli.errors import Refused
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchEnded
from storage.job_records import JobRow, Stopped
from storage.jobs import get_job
from storage.states import TERMINAL_STATES, BatchStatus, JobState
from storage.stops import cancel_batch, cancel_job


def decide(database: Database, target: BatchRow | JobRow) -> Stopped | None:
    """Decide in the database; None if the target was cancelled before. Raises Refused if it has ended otherwise."""
    if isinstance(target, JobRow):
        return _stop_job(database, target)
    try:
        return cancel_batch(database, target.id)
    except BatchEnded as error:
        row = get_batch(database, target.id)
        if row.status == BatchStatus.CANCELLED:
            return None
        raise Refused(f"{row.id} is {row.status}: there is nothing to cancel") from error


def _stop_job(database: Database, job: JobRow) -> Stopped | None:
    if job.state == JobState.CANCELLED:
        return None
    if job.state in TERMINAL_STATES:
        raise Refused(f"{job.id} is {job.state}: there is nothing to cancel")
    try:
        return cancel_job(database, job.id)
    except BatchEnded:
        return _stop_job(database, get_job(database, job.id))  # it ended in between
