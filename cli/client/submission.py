"""From a checked file to a batch that stands in the database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from shlex import quote
from typing import BinaryIO

from cli.client.batch import goes_on
from cli.client.input_file import Check, ErrorSink, digest, error_report, nowhere, requests
from cli.client.references import check_name
from cli.client.transport import Models, Order, Written
from cli.client.voice import Voice
from cli.errors import InputRefused, Interrupted, Refused
from cli.output import counted, duration, moment
from storage.batch_records import DEFAULT_PRIORITY, NewBatch, Submission
from storage.batches import add_jobs, batch_of_file, begin_submission, discard_batch, get_batch, publish_batch
from storage.database import Database
from storage.errors import BatchNotFound, NameTaken, StorageError
from storage.job_records import NewJob
from storage.reuse import reuse_results
from storage.states import TERMINAL_STATUSES, BatchStatus
from tasks.errors import ModelNameInvalid
from tasks.heads import check_model_name
from tasks.openai_batch import LineError, ParsedJob

#: said of a submission that Ctrl-C ended in time
NOTHING_QUEUED = "nothing was queued: the same command does it again"
#: jobs written in one transaction
CHUNK_JOBS = 1000
#: served names, and names that are not served, that an error lists
MAX_NAMES = 10


def refuse_invalid(check: Check, order: Order, voice: Voice, where: str) -> None:
    """Raises InputRefused for lines that cannot be jobs, unless they are to be left out, and for a file without one.

    `where`: how to see all of them if there are many.
    """
    report = error_report(check, where)
    if check.num_errors and not order.skip_invalid:
        raise InputRefused(report)
    if not check.num_jobs:
        raise InputRefused(report or "the file holds no request")
    if check.num_errors:
        are = "is" if check.num_errors == 1 else "are"
        voice.warn(f"{counted(check.num_errors, 'invalid line')} {are} left out:\n{report}")


def check_expected(names: Iterable[str]) -> None:
    """Raises InputRefused for a name that no head will ever serve."""
    for name in names:
        try:
            check_model_name(name)
        except ModelNameInvalid as error:
            raise InputRefused(f"--expect-model: {error}") from error


def refuse_unserved(
    stream: BinaryIO, check: Check, order: Order, models: Models, voice: Voice, tell: ErrorSink = nowhere
) -> None:
    """Raises InputRefused for lines whose model nobody serves, unless they are to be left out."""
    unserved = unserved_lines(check, models)
    if not unserved:
        return
    if tell is not nowhere:
        tell_unserved(stream, order, models, tell, voice)
    if not order.skip_invalid or len(unserved) == len(check.models):
        raise InputRefused("\n".join([*shortened(list(unserved.values())), *_ways(unserved, order, models)]))
    for message in shortened(list(unserved.values())):
        voice.warn(f"left out: {message}")


def remarks(written: Written, order: Order) -> Iterator[str]:
    """What may surprise somebody about the batch."""
    batch, counts = written.batch, written.batch.counts
    if written.resumed:
        yield f"an earlier submission of {batch.name!r} was cut off; this one has taken its place"
    if written.num_reused:
        yield f"{written.num_reused:,} of {counted(counts.total, 'job')} had a stored result"
    if (same := written.same_content) is not None:
        which = f"{same.id} ({same.name})" if same.name else same.id
        ago = duration(time.time() - same.created_at)
        yield f"same content as {which}, submitted {ago} ago: it runs once more (the same --name goes on with a batch)"
    if not written.existed:
        return
    yield f"submitted before as {batch.id}: {counts.num_ended} of its {counted(counts.total, 'job')} have ended"
    if order.metadata and order.metadata != batch.metadata:
        yield "its metadata stays as it is"
    if order.priority not in (None, batch.priority):
        yield f"its priority stays {batch.priority}"
    if order.expires_in_s is not None and batch.status not in TERMINAL_STATUSES:
        yield f"it expires as it would have: {moment(batch.expires_at) if batch.expires_at else 'never'}"
    if batch.status in TERMINAL_STATUSES and counts.completed < counts.total:
        yield f"`shardq retry {batch.id}` runs what failed or expired again"


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
        return (
            f"{where}: model: no model is served yet: start `shardq head --model MODEL`, or name it with --expect-model"
        )
    if name is None:
        return f"{where}: model: several models are served, name one with --model: {served}"
    return f"{where}: model: {name!r} is not served; served are: {served}"


def _ways(unserved: Iterable[str | None], order: Order, models: Models) -> list[str]:
    """What can be done about lines that name a model nobody serves."""
    chosen = {order.defaults.model, *order.defaults.map_model.values()}
    name = next((name for name in unserved if name not in chosen), None)
    if name is None:  # an option's, if any: it is mapped no further
        other = next((name for name in unserved if name is not None), None)
        return [f"`--expect-model {quote(other)}` waits for a head that serves it"] if other is not None else []
    waits = f"`--expect-model {quote(name)}` waits for a head that serves it"
    if not models.known:
        return [waits]
    served = models.default or "SERVED"
    all_lines = "--any-model" if models.default else "--any-model --model SERVED"
    return [f"`--map-model {quote(f'{name}={served}')}` sends its lines to {served}, `{all_lines}` all lines; {waits}"]


def shortened(messages: list[str]) -> list[str]:
    """The first messages, and how many more there are."""
    hidden = len(messages) - MAX_NAMES
    return messages if hidden <= 0 else [*messages[:MAX_NAMES], f"… and {hidden} more names"]


def tell_unserved(stream: BinaryIO, order: Order, models: Models, tell: ErrorSink, voice: Voice) -> None:
    """Tell of every line whose model is not served."""
    for item in requests(stream, order.defaults, "looking for models", voice):
        if isinstance(item, ParsedJob) and models.of(item) is None:
            name = item.model or models.default
            tell(LineError(item.line, "model", f"{name!r} is not served" if name else "expected the name of a model"))


def write_batch(
    database: Database, stream: BinaryIO, order: Order, models: Models, endpoint: str | None, voice: Voice
) -> Written:
    """Read the file a second time and write its jobs, or find the batch that was submitted before.

    Nothing of it can be seen by anybody before all of it is written. Raises Refused if the name is taken, and
    Interrupted, which says what stands in the database.
    """
    file_hash = digest(stream)
    submission = _begin(database, order, file_hash, endpoint)
    if submission.published:
        return Written(submission.batch, existed=True)
    with _discarded_on_failure(database, submission):
        num_invalid = _write_jobs(database, submission, stream, order, models, voice)
        if digest(stream) != file_hash:
            raise Refused("the file changed while it was read: submit it again")
        num_reused = reuse_results(database, submission) if order.reuse else 0
        batch = publish_batch(database, submission, num_invalid_lines=num_invalid)
    same = batch_of_file(database, file_hash, other_than=batch.id) if order.name is None else None
    return Written(batch, resumed=submission.resumed, num_reused=num_reused, same_content=same)


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
        order.metadata,
    )
    try:
        return begin_submission(database, new)
    except NameTaken as error:
        ways = f"give another --name, or see `shardq retry {order.name}` and `shardq delete {order.name}`"
        if not error.can_be_retried:
            ways = f"not all of that one's file was written: `shardq delete {order.name}` first, or give another --name"
        raise Refused(f"{error}: {ways}") from error


@contextmanager
def _discarded_on_failure(database: Database, submission: Submission) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        _discard(database, submission)
        raise Interrupted(_left(database, submission.batch.id)) from error
    except BaseException:
        _discard(database, submission)
        raise


def _discard(database: Database, submission: Submission) -> None:
    with suppress(StorageError):  # what came before is what is to be told
        discard_batch(database, submission)


def _left(database: Database, batch_id: str) -> str:
    """What an interrupted submission leaves behind: Ctrl-C may have come just after its last step."""
    try:
        batch = get_batch(database, batch_id)
    except BatchNotFound:
        return NOTHING_QUEUED
    except StorageError as error:
        return f"{error}; `shardq status {batch_id}` will say whether it was queued"
    if batch.status != BatchStatus.VALIDATING:
        return goes_on(batch)
    return f"{NOTHING_QUEUED} (`shardq delete {batch_id}` removes what was written of it)"


def _write_jobs(
    database: Database, submission: Submission, stream: BinaryIO, order: Order, models: Models, voice: Voice
) -> int:
    """Write the jobs in chunks; the number of lines left out."""
    num_invalid = 0
    now = database.now()

    def jobs() -> Iterator[NewJob]:
        nonlocal num_invalid
        for item in requests(stream, order.defaults, "queueing", voice):
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
