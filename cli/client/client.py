"""The client: batches are submitted to it and found through it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from cli.client.batch import Batch, cancel, feed
from cli.client.transport import Order, Transport
from cli.client.voice import Silence, Voice
from storage.batch_records import BatchRow
from storage.job_records import JobRow, Stopped
from storage.states import BatchStatus

# What a client needs once it works is imported then: `from shardq import Client` is to be quick.
if TYPE_CHECKING:
    from cli.client.input_file import Check, ErrorSink
    from cli.reasons import System
    from storage.filters import JobFilter


class Client:
    """Batches behind a transport. A context manager; not thread-safe."""

    def __init__(self, transport: Transport, voice: Voice | None = None) -> None:
        self._transport = transport
        self._voice = voice or Silence()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every connection."""
        self._transport.close()

    def place(self, stream: BinaryIO, check: Check, order: Order, tell: ErrorSink | None = None) -> Batch:
        """Queue a checked file; what may surprise about the batch is said. Raises InputRefused, Refused, Unavailable.

        `tell` hears of every line whose model nobody serves.
        """
        from cli.client.input_file import nowhere
        from cli.client.submission import check_expected, refuse_unserved, remarks

        check_expected(order.expected)
        models = self._transport.models().expecting(order.expected)
        refuse_unserved(stream, check, order, models, self._voice, tell or nowhere)
        written = self._transport.write(stream, order, models, check.endpoint, self._voice)
        for remark in remarks(written, order):
            self._voice.note(remark)
        feed(self._transport, self._voice)
        return self._batch(written.batch).refresh()

    def batch(self, reference: str) -> Batch:
        """The batch with this id, beginning of one, or name. Raises NotFound."""
        return self._batch(self._transport.batch(reference))

    def batches(self, *, limit: int = 50, statuses: Collection[BatchStatus] = ()) -> list[Batch]:
        """The newest batches first, those with one of `statuses` if any are given."""
        return [self._batch(row) for row in self._transport.batches(limit=limit, statuses=statuses)]

    def find(self, reference: str) -> Batch | JobRow:
        """The batch, or the job as `BATCH-LINE`, that is meant. Raises NotFound."""
        found = self._transport.find(reference)
        return self._batch(found) if isinstance(found, BatchRow) else found

    def jobs(self, wanted: JobFilter, *, logprobs: bool = False) -> Iterator[JobRow]:
        """The ended jobs of all batches that meet the filter, oldest batch first, in bounded memory."""
        return self._transport.jobs(wanted, None, logprobs=logprobs)

    def job(self, job_id: str) -> JobRow:
        """The job with this id. Raises NotFound."""
        return self._transport.job(job_id)

    def request(self, job_id: str) -> str:
        """JSON text of what a job asks for. Raises NotFound."""
        return self._transport.request(job_id)

    def cancel(self, target: Batch | JobRow) -> Stopped | None:
        """Stop a batch or one job; None if it was cancelled before. Raises Refused if it ended otherwise."""
        if isinstance(target, Batch):
            return target.cancel()
        return cancel(self._transport, self._voice, target)

    def wait_for_stop(self, target: Batch | JobRow) -> None:
        """Return once what was cancelled has ended, with or without a bookkeeper."""
        from cli.client.waiting import StopPasses, follow, wait_for_job

        passes = StopPasses(self._transport)
        if isinstance(target, Batch):
            follow(self._transport, target.row, self._voice.display(), passes)
            target.refresh()
        else:
            wait_for_job(self._transport, target.id, self._voice.note, passes)

    def system(self) -> System:
        """What lives now: heads, bookkeeper, queue."""
        return self._transport.system()

    def _batch(self, row: BatchRow) -> Batch:
        return Batch(self._transport, self._voice, row)
