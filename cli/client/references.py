"""What people call batches and jobs, and which ones they mean."""

from __future__ import annotations

import re
from contextlib import suppress

from cli.errors import InputRefused, NotFound, Refused
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchAmbiguous, BatchNotFound, StorageError
from storage.job_records import JobRow
from storage.jobs import get_job
from tasks.parameter_rules import is_text

#: `<batch>-<line>`, perhaps with the attempt of a task id
_JOB = re.compile(r"(?P<batch>.+)-(?P<line>[0-9]{1,9})(?:\.[0-9]+)?")
#: how the ids of result lines begin
_RESULT_LINE = "batch_req_"
#: and those of batches
_ID = "batch_"


def batch_or_job(database: Database, reference: str) -> BatchRow | JobRow:
    """The batch or job that is meant. Raises NotFound, BatchAmbiguous or JobNotFound.

    A batch is its id, the beginning of one, or its name; a job is `<batch>-<line>`, also as result lines
    (`batch_req_…`) and the dashboard (`….<attempt>`) show it. A batch whose name looks like a job comes first.
    """
    known = reference
    if reference.startswith(_RESULT_LINE):
        known = f"batch_{reference.removeprefix(_RESULT_LINE)}"
    try:
        return get_batch(database, known)
    except BatchAmbiguous:
        raise
    except BatchNotFound as error:
        job = _job(database, known)
        if job is None:
            ways = "expected an id, the beginning of one, a name, or BATCH-LINE (`shardq list` shows the batches)"
            raise NotFound(f"no batch or job {reference!r}: {ways}") from error
        return job


def check_name(database: Database, name: str) -> None:
    """Raises Refused for a name that nobody sees, or under which a batch would hide another one, or a job of one."""
    if not is_text(name) or "\0" in name or not any(letter.isprintable() and letter != " " for letter in name):
        raise InputRefused(f"--name {name!r}: expected a text that can be seen")
    if name.startswith(_ID):
        raise Refused(f"--name {name!r}: ids begin with {_ID}, give the batch another name")
    with suppress(NotFound, StorageError):
        found = batch_or_job(database, name)
        if isinstance(found, JobRow):
            raise Refused(f"--name {name!r} means line {found.line} of {found.batch_id}: give the batch another name")


def _job(database: Database, reference: str) -> JobRow | None:
    """The job; None if there is no such batch. Raises BatchAmbiguous or JobNotFound."""
    found = _JOB.fullmatch(reference)
    if found is None:
        return None
    try:
        batch = get_batch(database, found["batch"])
    except BatchAmbiguous:
        raise
    except BatchNotFound:
        return None
    return get_job(database, f"{batch.id}-{int(found['line'])}")
