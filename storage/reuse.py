"""Reuse: a job whose text has been generated before takes the result over instead of running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, bindparam, literal, select

from storage.batch_records import Submission
from storage.batches import check_ours
from storage.database import Database
from storage.served_models import profile_keys
from storage.states import JobState
from storage.tables import IS_REUSABLE, IS_WAITING, job

#: what a job takes over; figures of the generation stay with the job that ran
_COPIED = (
    *("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "profile_key"),
    *("choices", "logprobs"),
)
#: jobs of one transaction
_PAGE = 1000
#: request keys remembered with what was found for them, some 300 bytes each
_MAX_REMEMBERED = 50_000


def reuse_results(db: Database, submission: Submission) -> int:
    """Complete those jobs of a validating batch whose result is stored already; how many. Before publication.

    A stored result fits if its job was completed with the same request key by heads of the profile that the served
    name has when this begins, and was generated, not taken over itself. Of several the oldest is taken. Jobs are
    completed page by page, each in a transaction of its own: nobody waits for all of them. Raises
    SubmissionSuperseded; the pages before stay then, in a batch that is not published.
    """
    now = db.now()
    return sum(
        _complete_jobs(db, submission, _StoredResults(model, profile), now)
        for model, profile in _profiles(db, submission).items()
    )


class _WaitingJob(NamedTuple):
    line: int
    id: str
    request_key: str


class _StoredResults:
    """The oldest stored result of each request key, of one served name and profile.

    What was found is remembered: a batch of equal requests reads their stored twins once, not once a job.
    """

    def __init__(self, model: str, profile: str) -> None:
        self.model = model
        self._profile = profile
        self._remembered: dict[str, str | None] = {}

    def matches(self, connection: Connection, page: Sequence[_WaitingJob]) -> list[dict[str, Any]]:
        """The jobs of a page that a stored result fits, each with the id of the job that has it."""
        if len(self._remembered) > _MAX_REMEMBERED:
            self.forget()
        self._look_up(connection, page)
        sources = [(item.id, self._remembered[item.request_key]) for item in page]
        return [{"job_id": job_id, "source_id": source} for job_id, source in sources if source is not None]

    def forget(self) -> None:
        """Look everything up again from now on."""
        self._remembered.clear()

    def _look_up(self, connection: Connection, page: Sequence[_WaitingJob]) -> None:
        """Remember what is stored for the request keys of a page; one job stands for all that have its key."""
        asking = {item.request_key: item.id for item in page if item.request_key not in self._remembered}
        query = select(job.c.request_key, self._oldest().label("source")).where(job.c.id.in_(asking.values()))
        self._remembered |= {row.request_key: row.source for row in connection.execute(query)}

    def _oldest(self) -> ColumnElement[Any]:
        stored = job.alias("stored")
        # The unqualified names of IS_REUSABLE are those of the innermost table.
        return (
            select(stored.c.id)
            .where(stored.c.request_key == job.c.request_key, IS_REUSABLE)
            .where(stored.c.profile_key == self._profile, stored.c.model == self.model)
            .order_by(stored.c.recorded_at, stored.c.id)
            .limit(1)
            .correlate(job)
            .scalar_subquery()
        )


def _profiles(db: Database, submission: Submission) -> dict[str, str]:
    """The digests of the profiles that the served names of the batch's waiting jobs have now."""
    models = select(job.c.model).where(job.c.batch_id == submission.batch.id, IS_WAITING).distinct()
    with db.write() as connection:
        check_ours(connection, submission)
        return profile_keys(connection, connection.execute(models).scalars().all())


def _complete_jobs(db: Database, submission: Submission, stored: _StoredResults, now: float) -> int:
    """Complete the jobs of one served name that a stored result fits; how many."""
    completed = line = 0
    while True:
        with db.write() as connection:
            check_ours(connection, submission)
            page = _waiting_jobs(connection, submission.batch.id, stored.model, line)
            matches = stored.matches(connection, page)
            taken = _take_over(connection, matches, now)
        if not page:
            return completed
        completed += taken
        if taken < len(matches):
            # Remembered results were deleted since: what is left of the page may find others.
            stored.forget()
        else:
            line = page[-1].line


def _waiting_jobs(connection: Connection, batch_id: str, model: str, after_line: int) -> list[_WaitingJob]:
    query = select(job.c.line, job.c.id, job.c.request_key).where(
        job.c.batch_id == batch_id, job.c.model == model, IS_WAITING, job.c.line > after_line
    )
    return [_WaitingJob(*row) for row in connection.execute(query.order_by(job.c.line).limit(_PAGE))]


def _take_over(connection: Connection, matches: Sequence[dict[str, Any]], now: float) -> int:
    """Complete these jobs; how many. Those whose source is gone are left as they are."""
    if not matches:
        return 0
    stored = job.alias("stored")
    pair = (job.c.id == bindparam("job_id"), stored.c.id == bindparam("source_id"))
    update = job.update().where(*pair, stored.c.request_key == job.c.request_key)
    values: dict[str, ColumnElement[Any]] = {name: stored.c[name] for name in _COPIED}
    values |= {"state": literal(JobState.COMPLETED), "recorded_at": literal(now), "reused_from": stored.c.id}
    return connection.execute(update.values(values), list(matches)).rowcount
