"""The client: batches are submitted to it and found through it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self

from cli.client.batch import Batch, cancel, feed
from cli.client.installation import local
from cli.client.transport import Order, Transport
from cli.client.voice import Silence, Voice
from cli.interruption import interruptible
from storage.batch_records import BatchRow
from storage.job_records import JobRow, Stopped
from storage.states import TERMINAL_STATES, BatchStatus

# What a client needs once it works is imported then: `from shardq import Client` is to be quick.
if TYPE_CHECKING:
    from cli.client.input_file import Check, ErrorSink
    from cli.client.results import Results
    from cli.client.source import Source
    from cli.reasons import System
    from storage.filters import JobFilter

#: invalid lines that an error lists
MAX_ERRORS = 20


class Client:
    """Batches behind a transport. A context manager; not thread-safe. Every method raises a ShardqError."""

    def __init__(
        self, transport: Transport | None = None, *, data_dir: str | Path | None = None, quiet: bool = False
    ) -> None:
        """`transport`: without one, the installation of this machine that `shardq` finds, or that of `data_dir`.

        `quiet`: neither remarks nor progress on stderr.
        """
        self._transport = transport or local(data_dir)
        self._voice: Voice = Silence() if quiet else _usual_voice()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every connection."""
        self._transport.close()

    def submit(
        self,
        source: Source,
        *,
        name: str | None = None,
        model: str | None = None,
        map_model: Mapping[str, str] | None = None,
        any_model: bool = False,
        expect_model: str | Collection[str] = (),
        priority: int | None = None,
        expires_in: str | float | None = None,
        metadata: Mapping[str, str] | None = None,
        reuse: bool = False,
        on_invalid: Literal["reject", "skip"] = "reject",
        **parameters: Any,
    ) -> Batch:
        """Check what is given, all of it, and queue it as a batch.

        `source`: the path of a file of lines; a DataFrame with a column for each field; or, one after the other,
        prompts (texts), chats (lists of messages) or requests (the object of a line). The keywords are the options of
        `shardq submit`: `parameters` (`max_tokens`, `temperature`, …) are for what says nothing itself; the same
        `name` and source are the same batch; `expires_in` is `"2h"` or seconds. Says why the batch will not move,
        if it will not. Raises InputRefused, Refused, Unavailable, and Interrupted, which says what stands.
        """
        from cli.client.orders import order_of
        from cli.client.source import opened
        from cli.client.submission import NOTHING_QUEUED

        order = order_of(
            name=name,
            model=model,
            map_model=map_model,
            any_model=any_model,
            expect_model=expect_model,
            priority=priority,
            expires_in=expires_in,
            metadata=metadata,
            reuse=reuse,
            on_invalid=on_invalid,
            **parameters,
        )
        with interruptible(lambda: NOTHING_QUEUED), opened(source, self._voice) as stream:
            batch = self.place(stream, self._checked(stream, order), order)
        with batch.left_alone():
            for reason in batch.obstacles():
                self._voice.warn(reason)
        return batch

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
        batch = self._batch(written.batch)
        with batch.left_alone():
            for remark in remarks(written, order):
                self._voice.note(remark)
            feed(self._transport, self._voice)
            return batch.refresh()

    def batch(self, reference: str) -> Batch:
        """The batch with this id, beginning of one, or name. Raises NotFound."""
        return self._batch(self._transport.batch(reference))

    def batches(self, *, limit: int = 50, statuses: Collection[BatchStatus] = ()) -> list[Batch]:
        """The newest batches first, those with one of `statuses` (`"completed"`, …) if any are given."""
        from cli.client.orders import check_limit, statuses_of

        check_limit(limit)
        return [self._batch(row) for row in self._transport.batches(limit=limit, statuses=statuses_of(statuses))]

    def find(self, reference: str) -> Batch | JobRow:
        """The batch, or the job as `BATCH-LINE`, that is meant. Raises NotFound."""
        found = self._transport.find(reference)
        return self._batch(found) if isinstance(found, BatchRow) else found

    def results(self, *, where: str | Collection[str] = ()) -> Results:
        """As a batch's, of all batches, the oldest first."""
        from cli.client.results import Results, filter_of

        return Results(self._transport, filter_of(TERMINAL_STATES, where), None)

    def jobs(self, wanted: JobFilter, *, logprobs: bool = False, requests: bool = False) -> Iterator[JobRow]:
        """The ended jobs of all batches that meet the filter, oldest batch first, in bounded memory."""
        return self._transport.jobs(wanted, None, logprobs=logprobs, requests=requests)

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

    def _checked(self, stream: BinaryIO, order: Order) -> Check:
        from cli.client.input_file import check_input
        from cli.client.submission import refuse_invalid

        check = check_input(stream, order.defaults, self._voice, max_errors=MAX_ERRORS)
        refuse_invalid(check, order, self._voice, '`on_invalid="skip"` leaves them out')
        return check

    def _batch(self, row: BatchRow) -> Batch:
        return Batch(self._transport, self._voice, row)


def _usual_voice() -> Voice:
    from cli.terminal import Terminal

    return Terminal()
