"""The database and queue server of this installation as a `Transport`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from pydantic_settings import BaseSettings

from cli.client.edge import translated_errors
from cli.client.references import batch_or_job
from cli.client.stopping import decide
from cli.client.transport import Models, Order, Retried, RetryOrder, Written
from cli.client.voice import Voice
from storage.batch_records import BatchFigures, BatchRow, Progress
from storage.batches import get_batch, list_batches
from storage.database import Database
from storage.figures import batch_figures
from storage.filters import JobFilter
from storage.job_records import JobRow, Stopped
from storage.jobs import get_job, open_models, progress
from storage.queries import find_jobs, request_of
from storage.settings import StorageSettings
from storage.states import BatchStatus
from tasks.settings import BookkeeperSettings

# Most commands only read the database: what talks to the queue server takes as long to import as all the rest.
if TYPE_CHECKING:
    from cli.client.queue_server import QueueServer
    from cli.reasons import System

S = TypeVar("S", bound=BaseSettings)


class Local:
    """Opened once; the queue server is contacted only by what needs it."""

    def __init__(self, database: Database, settings: BookkeeperSettings) -> None:
        self._database = database
        self._settings = settings
        self._server: QueueServer | None = None

    @classmethod
    def open(cls, named: Mapping[str, str]) -> Self:
        """Where these variables say, and this process' own for those not among them.

        Raises SettingInvalid, Unavailable.
        """
        with translated_errors():
            url = _settings(StorageSettings, named).database_url
            return cls(Database.open(url), _settings(BookkeeperSettings, named))

    def models(self) -> Models:
        with translated_errors():
            return self._queue().models()

    def write(self, stream: BinaryIO, order: Order, models: Models, endpoint: str | None, voice: Voice) -> Written:
        from cli.client.submission import write_batch

        with translated_errors():
            self._queue().refuse_other_database(voice)
            return write_batch(self._database, stream, order, models, endpoint, voice)

    def feed(self) -> None:
        with translated_errors():
            self._queue().feed()

    def find(self, reference: str) -> BatchRow | JobRow:
        with translated_errors():
            return batch_or_job(self._database, reference)

    def batch(self, reference: str) -> BatchRow:
        with translated_errors():
            return get_batch(self._database, reference)

    def job(self, job_id: str) -> JobRow:
        with translated_errors():
            return get_job(self._database, job_id)

    def request(self, job_id: str) -> str:
        with translated_errors():
            return request_of(self._database, job_id)

    def batches(self, *, limit: int, statuses: Collection[BatchStatus]) -> list[BatchRow]:
        with translated_errors():
            return list_batches(self._database, limit=limit, statuses=statuses)

    def figures(self, batch_id: str) -> BatchFigures:
        with translated_errors():
            return batch_figures(self._database, batch_id)

    def progress(self, batch_id: str) -> Progress:
        with translated_errors():
            return progress(self._database, batch_id)

    def open_models(self, batch_id: str) -> frozenset[str]:
        with translated_errors():
            return open_models(self._database, batch_id)

    def jobs(
        self, wanted: JobFilter, batch_id: str | None, *, logprobs: bool = False, requests: bool = False
    ) -> Iterator[JobRow]:
        found = find_jobs(self._database, wanted, batch_id=batch_id, logprobs=logprobs, requests=requests)
        while True:
            # Around the reading alone: what whoever has the row does with it is none of ours.
            with translated_errors():
                row = next(found, None)
            if row is None:
                return
            yield row

    def retry(self, batch: BatchRow, order: RetryOrder) -> Retried:
        from cli.client.retrying import run_again

        with translated_errors():
            self._queue().refuse_other_database_if_told()
            return run_again(self._database, batch, order)

    def cancel(self, target: BatchRow | JobRow) -> Stopped | None:
        with translated_errors():
            return decide(self._database, target)

    def carry_out_stops(self) -> None:
        with translated_errors():
            self._queue().carry_out_stops()

    def system(self) -> System:
        with translated_errors():
            return self._queue().system()

    def tokens_per_s(self) -> float | None:
        with translated_errors():
            return self._queue().tokens_per_s()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._database.close()

    def _queue(self) -> QueueServer:
        """The queue server, not contacted yet."""
        from cli.client.queue_server import QueueServer

        if self._server is None:
            self._server = QueueServer(self._database, self._settings)
        return self._server


def _settings(kind: type[S], named: Mapping[str, str]) -> S:
    variables = {field: f"SHARDQ_{field.upper()}" for field in kind.model_fields}
    given: dict[str, Any] = {field: named[variable] for field, variable in variables.items() if variable in named}
    return kind(**given)
