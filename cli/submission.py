"""From a checked file to a batch whose jobs stand in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from cli.errors import CliError, InputRefused
from cli.input_file import Check, ErrorSink, digest, requests
from cli.output import warn
from cli.references import check_name
from storage.batch_records import DEFAULT_PRIORITY, BatchRow, NewBatch, Submission
from storage.batches import add_jobs, begin_submission, discard_batch, get_batch, publish_batch
from storage.database import Database
from storage.errors import NameTaken, StorageError
from storage.job_records import NewJob
from storage.reuse import reuse_results
from tasks.connection import connect, ping, translated
from tasks.errors import QueueUnreachable
from tasks.feeder import feed_once
from tasks.openai_batch import Defaults, LineError, ParsedJob
from tasks.served import mirror_models, model_names
from tasks.settings import BookkeeperSettings, TaskSettings

#: jobs written in one transaction
CHUNK_JOBS = 1000
#: served names, and names that are not served, that an error lists
MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class Order:
    """What the user asked for."""

    name: str | None
    defaults: Defaults
    #: leave invalid lines out instead of refusing the file
    skip_invalid: bool
    #: 0 is served first, 9 last; None: the usual one
    priority: int | None = None
    #: from submission until unfinished jobs expire; None: never
    expires_in_s: float | None = None
    #: take stored results of the same jobs
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A batch that stands in the database, and how it came there."""

    batch: BatchRow
    #: submitted before under this name
    existed: bool = False
    #: in place of a submission that was cut off
    resumed: bool = False
    #: jobs that got a stored result
    num_reused: int = 0


@dataclass(frozen=True, slots=True)
class Models:
    """The served names that a batch may use."""

    known: frozenset[str]
    #: for jobs that name none
    default: str | None

    def of(self, job: ParsedJob) -> str | None:
        """The served name of a job, or None if it has none."""
        name = job.model or self.default
        return name if name in self.known else None


def served_models(database: Database) -> Models:
    """Ask the queue server which names are served. Raises QueueUnreachable or QueueRefused."""
    client = connect(TaskSettings())
    try:
        ping(client)
        with translated():
            mirror_models(client, database)
            known = model_names(client, database)
    finally:
        client.close()
    return Models(frozenset(known), known[0] if len(known) == 1 else None)


def unserved_lines(check: Check, models: Models) -> dict[str | None, str]:
    """What is wrong with each model name of the file that is not served."""
    return {
        name: _unserved(name, check, models) for name in check.models if (name or models.default) not in models.known
    }


def _unserved(name: str | None, check: Check, models: Models) -> str:
    line, others = check.first_lines[name], check.models[name] - 1
    where = f"line {line}" + (f" and {others} more" if others else "")
    names = sorted(models.known)
    served = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
    if not names:
        return f"{where}: model: no model is served yet: start a head with `shardq head --model MODEL`"
    if name is None:
        return f"{where}: model: several models are served, name one with --model: {served}"
    return f"{where}: model: {name!r} is not served; served are: {served}"


def shortened(messages: list[str]) -> list[str]:
    """The first messages, and how many more there are."""
    hidden = len(messages) - MAX_NAMES
    return messages if hidden <= 0 else [*messages[:MAX_NAMES], f"… and {hidden} more names"]


def tell_unserved(stream: BinaryIO, order: Order, models: Models, tell: ErrorSink) -> None:
    """Tell of every line whose model is not served."""
    for item in requests(stream, order.defaults, "looking for models"):
        if isinstance(item, ParsedJob) and models.of(item) is None:
            name = item.model or models.default
            tell(LineError(item.line, "model", f"{name!r} is not served" if name else "expected the name of a model"))


def write_batch(
    database: Database, stream: BinaryIO, order: Order, models: Models, endpoint: str | None = None
) -> Written:
    """Read the file a second time and write its jobs, or find the batch that was submitted before.

    Nothing of it can be seen by anybody before all of it is written. Raises CliError if the name is taken.
    """
    file_hash = digest(stream)
    submission = _begin(database, order, file_hash, endpoint)
    if submission.published:
        return Written(submission.batch, existed=True)
    with _discarded_on_failure(database, submission):
        num_invalid = _write_jobs(database, submission, stream, order, models)
        if digest(stream) != file_hash:
            raise CliError("the file changed while it was read: submit it again")
        num_reused = reuse_results(database, submission) if order.reuse else 0
        batch = publish_batch(database, submission, num_invalid_lines=num_invalid)
        return Written(batch, resumed=submission.resumed, num_reused=num_reused)


def _begin(database: Database, order: Order, file_hash: str, endpoint: str | None) -> Submission:
    if order.name is not None:
        check_name(database, order.name)
    expires_at = None if order.expires_in_s is None else database.now() + order.expires_in_s
    new = NewBatch(
        file_hash,
        order.name,
        order.defaults.to_json(),
        endpoint,
        DEFAULT_PRIORITY if order.priority is None else order.priority,
        expires_at,
    )
    try:
        return begin_submission(database, new)
    except NameTaken as error:
        ways = f"give another --name, or see `shardq retry {order.name}` and `shardq delete {order.name}`"
        if not error.can_be_retried:
            ways = f"not all of that one's file was written: `shardq delete {order.name}` first, or give another --name"
        raise CliError(f"{error}: {ways}") from error


@contextmanager
def _discarded_on_failure(database: Database, submission: Submission) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # the first error is the one to be told
            discard_batch(database, submission)
        raise


def _write_jobs(database: Database, submission: Submission, stream: BinaryIO, order: Order, models: Models) -> int:
    """Write the jobs in chunks; the number of lines left out."""
    num_invalid = 0
    now = database.now()

    def jobs() -> Iterator[NewJob]:
        nonlocal num_invalid
        for item in requests(stream, order.defaults, "queueing"):
            model = None if isinstance(item, LineError) else models.of(item)
            if isinstance(item, ParsedJob) and model is not None:
                yield item.new_job(model, now)
            elif order.skip_invalid:
                num_invalid += 1
            else:
                raise InputRefused("the file changed while it was read: submit it again")

    remaining = jobs()
    while chunk := list(islice(remaining, CHUNK_JOBS)):
        add_jobs(database, submission, chunk)
    return num_invalid


def feed(database: Database, batch: BatchRow) -> BatchRow:
    """One pass of the feeder, so that the jobs stand in the queue; the batch afterwards."""
    try:
        feed_once(database, BookkeeperSettings())
    except QueueUnreachable as error:
        warn(f"{error}; the bookkeeper will queue the jobs")
    return get_batch(database, batch.id)
