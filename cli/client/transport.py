"""The seam to where batches are: what can be asked and told, in records that could also cross a wire.

`cli/client/local.py` is the database of this installation. Each call is one request of an API of files and batches
(models, upload and create, retrieve, list, cancel, the results as a stream) or one that such an API can leave empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

from storage.batch_records import BatchFigures, BatchRow, Progress
from storage.job_records import JobRow, Stopped
from storage.states import BatchStatus, JobState

# For their names alone: the import of a client is to be quick.
if TYPE_CHECKING:
    from cli.client.voice import Voice
    from cli.reasons import System
    from storage.filters import JobFilter
    from tasks.openai_batch import Defaults, ParsedJob


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
    #: served names that may be waited for, though no head has had them yet
    expected: frozenset[str] = frozenset()
    #: notes of the user's own
    metadata: dict[str, str] | None = None


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
    #: the latest other batch of the same content, if this one has no name to tell them apart
    same_content: BatchRow | None = None


@dataclass(frozen=True, slots=True)
class Models:
    """The served names that a batch may use."""

    known: frozenset[str]
    #: for jobs that name none
    default: str | None

    def expecting(self, names: frozenset[str]) -> Models:
        """With these names as if they were served; the only one is for the jobs that name none."""
        default = next(iter(names)) if len(names) == 1 else self.default
        return Models(self.known | names, default)

    def of(self, job: ParsedJob) -> str | None:
        """The served name of a job, or None if it has none."""
        name = job.model or self.default
        return name if name in self.known else None


@dataclass(frozen=True, slots=True)
class RetryOrder:
    """Which ended jobs of a batch are to run again."""

    #: none: what failed or expired, or whatever the codes and jobs are in
    states: frozenset[JobState] = frozenset()
    #: codes of their errors; none: any but those whose cause is the request itself
    codes: frozenset[str] = frozenset()
    #: by custom_id or id; none: any
    jobs: tuple[str, ...] = ()
    #: from now until they expire; None: as before if that lies ahead, else never
    expires_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of a `RetryOrder`."""

    #: jobs that run again
    number: int
    #: those with one of these states were meant
    states: frozenset[JobState]
    #: jobs that were left out, since they would fail again as they are, by code
    left_out: dict[str, int]


class Transport(Protocol):
    """Where batches are. Every method raises a ShardqError and nothing else; a `batch_id` is a whole id."""

    def models(self) -> Models:
        """The names that are served. Raises Unavailable."""

    def write(self, stream: BinaryIO, order: Order, models: Models, endpoint: str | None, voice: Voice) -> Written:
        """Make a batch of a checked file, or find the one that was made of it before.

        Nothing of it can be seen by anybody before all of it is written. Raises Refused, InputRefused.
        """

    def feed(self) -> None:
        """Put waiting jobs into the queue now; without it that happens a little later. Raises Unavailable."""

    def find(self, reference: str) -> BatchRow | JobRow:
        """The batch (id, beginning of one, name) or job (`BATCH-LINE`) that is meant. Raises NotFound."""

    def batch(self, reference: str) -> BatchRow:
        """The batch with this id, beginning of one, or name. Raises NotFound."""

    def job(self, job_id: str) -> JobRow:
        """The job with this id. Raises NotFound."""

    def request(self, job_id: str) -> str:
        """JSON text of what the job asks for. Raises NotFound."""

    def batches(self, *, limit: int, statuses: Collection[BatchStatus]) -> list[BatchRow]:
        """The newest batches first; of any status without `statuses`."""

    def figures(self, batch_id: str) -> BatchFigures:
        """A batch's figures."""

    def progress(self, batch_id: str) -> Progress:
        """How far a batch is: asked for twice a second."""

    def open_models(self, batch_id: str) -> frozenset[str]:
        """The served names that the batch's open jobs ask for."""

    def jobs(
        self, wanted: JobFilter, batch_id: str | None, *, logprobs: bool = False, requests: bool = False
    ) -> Iterator[JobRow]:
        """The ended jobs of one or all batches that meet the filter, in input order and bounded memory.

        Log probabilities and requests are read only if they are asked for.
        """

    def retry(self, batch: BatchRow, order: RetryOrder) -> Retried:
        """Let jobs of an ended batch wait again. Raises Refused while the batch is open."""

    def cancel(self, target: BatchRow | JobRow) -> Stopped | None:
        """Decide that a batch or job stops; None if it was cancelled before. Raises Refused if it ended otherwise."""

    def carry_out_stops(self) -> None:
        """Tell engines of what is to stop now; without it that happens a little later. Raises Unavailable."""

    def system(self) -> System:
        """What lives now: heads, bookkeeper, queue."""

    def tokens_per_s(self) -> float | None:
        """What all heads commit right now; None if that is not known."""

    def close(self) -> None:
        """Let go of every connection."""
