"""What people call batches and jobs, and which ones they mean."""

from __future__ import annotations

import re

from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchAmbiguous, BatchNotFound
from storage.jobs import get_job
from storage.records import BatchRow, JobRow

#: `<batch>-<line>`, perhaps with the attempt of a task id
_JOB = re.compile(r"(?P<batch>.+)-(?P<line>[0-9]+)(?:\.[0-9]+)?")
#: how the ids of result lines begin
_RESULT_LINE = "batch_req_"


def batch_or_job(database: Database, reference: str) -> BatchRow | JobRow:
    """The batch or job that is meant. Raises BatchNotFound, BatchAmbiguous or JobNotFound.

    A batch is its id, the beginning of one, or its name; a job is `<batch>-<line>`, also as result lines
    (`batch_req_…`) and the dashboard (`….<attempt>`) show it. A batch whose name looks like a job comes first.
    """
    if reference.startswith(_RESULT_LINE):
        reference = f"batch_{reference.removeprefix(_RESULT_LINE)}"
    try:
        return get_batch(database, reference)
    except BatchAmbiguous:
        raise
    except BatchNotFound as error:
        found = _JOB.fullmatch(reference)
        if found is None:
            raise
        try:
            batch = get_batch(database, found["batch"])
        except BatchNotFound:
            raise error from None
        return get_job(database, f"{batch.id}-{int(found['line'])}")
