"""The text of a running job, piece by piece: from its head while it runs, from the database at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from cli.batches import why_unpublished
from cli.reasons import look_around, why_nothing_moves
from storage.batch_records import Counts
from storage.batches import get_batch
from storage.database import Database
from storage.job_records import JobRow
from storage.jobs import get_job
from storage.states import TERMINAL_STATES, BatchStatus, JobState
from tasks import following
from tasks.connection import translated
from tasks.errors import TaskError

#: seconds between two looks at what was told, and at the database
POLL_S = 0.1
LOOK_S = 0.5
#: seconds between two renewals of the wish to follow, and between two words on why a job waits
RENEW_S = 2.0
EXPLAIN_S = 20.0


class LiveText:
    """Follows one choice of one job.

    Pieces go to `write`, each character once and in order, whatever heads did meanwhile: every increment says where it
    begins. What stands in the way goes to `say`.
    """

    def __init__(
        self,
        database: Database,
        client: redis.Redis,
        row: JobRow,
        choice: int,
        write: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._database = database
        self._client = client
        self._row = row
        self._choice = choice
        self._write = write
        self._say = say
        self._length = 0
        self._entry = "0"
        self._renew_at = self._look_at = 0.0
        self._explain_at = time.monotonic() + 1.0
        self._reasons: list[str] = []
        self._begin_at_once = True

    def to_the_end(self) -> JobRow:
        """Write what is committed until the job has ended; the ended job. Its last words stand in the database."""
        while self._row.state not in TERMINAL_STATES:
            now = time.monotonic()
            try:
                with translated():
                    self._listen(now)
            except TaskError as error:
                self._explain([f"{error}; the text comes when the job has ended"])
            self._look(now)
            time.sleep(POLL_S)
        return self._row

    def _listen(self, now: float) -> None:
        task_id = f"{self._row.id}.{self._row.attempt}"
        if self._begin_at_once:
            following.follow(self._client, task_id)
            self._begin_at_once, self._renew_at = False, now + RENEW_S
        elif now >= self._renew_at:
            following.go_on(self._client, task_id)
            self._renew_at = now + RENEW_S
        for entry, increment in following.told(self._client, task_id, self._entry):
            self._entry = entry
            if increment.choice == self._choice:
                self._take(increment)

    def _take(self, increment: following.Increment) -> None:
        if increment.position > self._length:
            self._begin_at_once = True  # entries were dropped before we read them: ask for the whole text
            return
        new = increment.text[self._length - increment.position :]
        if new:
            self._length += len(new)
            self._write(new)

    def _look(self, now: float) -> None:
        """How the job is now; of one that does not run, say why."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        before, self._row = self._row, get_job(self._database, self._row.id)
        if before.attempt != self._row.attempt:
            self._entry, self._begin_at_once = "0", True
        if self._row.state in (JobState.WAITING, JobState.QUEUED) and now >= self._explain_at:
            self._explain_at = now + EXPLAIN_S
            self._explain(self._why_it_waits())

    def _why_it_waits(self) -> list[str]:
        if get_batch(self._database, self._row.batch_id).status == BatchStatus.VALIDATING:
            return [f"{self._row.id} is not queued yet: {why_unpublished(self._row.batch_id)}"]
        counts = Counts(**{self._row.state: 1})
        reasons = list(why_nothing_moves(look_around(database=self._database), counts, models=[self._row.model]))
        return reasons or [f"{self._row.id} is {self._row.state}: jobs before it are served first"]

    def _explain(self, reasons: list[str]) -> None:
        """Each change of the reasons once."""
        if reasons != self._reasons:
            self._reasons = reasons
            for reason in reasons:
                self._say(reason)


def stored_text(row: JobRow, choice: int) -> str | None:
    """The recorded text of a choice; None if there is none."""
    texts = [row.text, *(other.text for other in row.choices)]
    return texts[choice] if choice < len(texts) else None
