"""One batch, to be waited for, read, run again or cancelled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from cli.client.transport import Retried, RetryOrder, Transport
from cli.client.voice import Silence, Voice
from cli.errors import Unavailable
from cli.interruption import interruptible
from storage.batch_records import BatchFigures, BatchRow, Counts
from storage.job_records import JobRow, Stopped
from storage.states import TERMINAL_STATES, TERMINAL_STATUSES, BatchStatus, JobState

if TYPE_CHECKING:
    from cli.client.results import Results
    from cli.reasons import System
    from storage.filters import JobFilter

#: states of the jobs that ended without success
NOT_DONE = TERMINAL_STATES - {JobState.COMPLETED}


class Batch:
    """A batch as it was when it was last asked for: `refresh` asks again, and so does everything that changes it."""

    def __init__(self, transport: Transport, voice: Voice, row: BatchRow) -> None:
        self._transport = transport
        self._voice = voice
        self.row = row

    def __repr__(self) -> str:
        return f"<Batch {self.id}: {self.status}, {self.counts.num_ended} of {self.counts.total} jobs ended>"

    @property
    def id(self) -> str:
        """The batch's id."""
        return self.row.id

    @property
    def name(self) -> str | None:
        """The name that it was given."""
        return self.row.name

    @property
    def status(self) -> BatchStatus:
        """As OpenAI's Batch API names it."""
        return self.row.status

    @property
    def counts(self) -> Counts:
        """Its jobs by state."""
        return self.row.counts

    @property
    def ended(self) -> bool:
        """Whether its last job has ended."""
        return self.status in TERMINAL_STATUSES

    def refresh(self) -> Self:
        """Ask how the batch is now."""
        self.row = self._transport.batch(self.id)
        return self

    def figures(self) -> BatchFigures:
        """Tokens, speed and times of its jobs that have ended."""
        return self._transport.figures(self.id)

    def obstacles(self, system: System | None = None) -> list[str]:
        """Why it does not move, one line each with the next step; nothing if all is well.

        `system`: what lives now, if it was asked for already.
        """
        if self.ended:
            return []
        from cli.client.waiting import obstacles

        return obstacles(self._transport, self.row, system)

    def wait(self, *, progress: bool = True, on_poll: Callable[[], None] = lambda: None) -> Self:
        """Return once the last job has ended. `on_poll` is called at every look.

        Ctrl-C leaves the batch alone: Interrupted, a KeyboardInterrupt, says so.
        """
        from cli.client.waiting import follow

        display = self._voice.display() if progress else Silence()
        with self.left_alone():
            follow(self._transport, self.row, display, on_poll)
        return self.refresh()

    def left_alone(self) -> AbstractContextManager[None]:
        """A block in which Ctrl-C leaves the batch alone, and says so as Interrupted."""
        return interruptible(lambda: goes_on(self.refresh().row))

    def jobs(self, wanted: JobFilter, *, logprobs: bool = False, requests: bool = False) -> Iterator[JobRow]:
        """Its ended jobs that meet the filter, in input order and bounded memory."""
        return self._transport.jobs(wanted, self.id, logprobs=logprobs, requests=requests)

    def results(self, *, where: str | Collection[str] = ()) -> Results:
        """Its jobs that have ended, however they did; with `where` those that meet conditions as `"ttft_s>2"`.

        Raises InputRefused for a condition that is none.
        """
        return self._results(TERMINAL_STATES, where)

    def failed(self, *, where: str | Collection[str] = ()) -> Results:
        """As `results`, of the jobs that failed, were cancelled or expired."""
        return self._results(NOT_DONE, where)

    def _results(self, states: frozenset[JobState], where: str | Collection[str]) -> Results:
        from cli.client.results import Results, filter_of

        return Results(self._transport, filter_of(states, where), self.id)

    def retry(
        self,
        *,
        jobs: Collection[str] = (),
        codes: Collection[str] = (),
        states: Collection[JobState] = (),
        expires_in: str | float | None = None,
    ) -> int:
        """Run jobs of the ended batch again; how many. Say `wait` afterwards.

        Without a choice: what failed or expired, but for jobs whose request was the cause. `jobs` by custom_id or id,
        `codes` of their errors, `states` as `"cancelled"`. Raises InputRefused, Refused while the batch is open.
        """
        from cli.client.orders import duration_of, states_of

        order = RetryOrder(states_of(states), frozenset(codes), tuple(jobs), duration_of(expires_in))
        return self.run_again(order).number

    def run_again(self, order: RetryOrder) -> Retried:
        """As `retry`, with what became of it. Says what is left out, and why nothing runs if nothing does."""
        from cli.client.retrying import remarks

        with self.left_alone():
            retried = self._transport.retry(self.row, order)
            if retried.number:
                feed(self._transport, self._voice)
            self.refresh()
        for remark in remarks(self.row, order, retried):
            self._voice.note(remark)
        return retried

    def cancel(self) -> Stopped | None:
        """Stop what has not ended; None if it was cancelled before. Raises Refused if it ended otherwise."""
        stopped = cancel(self._transport, self._voice, self.row)
        self.refresh()
        return stopped


def goes_on(row: BatchRow) -> str:
    """Said of a batch that was queued, to whoever does not wait for its end."""
    if row.status in TERMINAL_STATUSES:
        return f"{row.id} has ended: `shardq status {row.id}` says how, `shardq results {row.id}` what came out"
    return (
        f"{row.id} is queued and goes on without you: `shardq status {row.id} --watch` shows its progress, "
        f"`shardq results {row.id}` what came out, `shardq cancel {row.id}` stops it"
    )


def feed(transport: Transport, voice: Voice) -> None:
    """Put waiting jobs into the queue at once, if that can be done."""
    try:
        transport.feed()
    except Unavailable as error:
        voice.warn(f"{error}; the bookkeeper will queue the jobs")


def cancel(transport: Transport, voice: Voice, target: BatchRow | JobRow) -> Stopped | None:
    """Stop a batch or a job: what has ended by then, and what is still stopping. None if it was cancelled before.

    Raises Refused if it ended otherwise.
    """
    stopped = transport.cancel(target)
    if stopped is None:
        return None
    try:
        transport.carry_out_stops()
    except Unavailable as error:
        voice.warn(f"{error}; it stands in the database, and engines will hear of it from the bookkeeper")
    still = _num_open(transport, target)
    return Stopped(stopped.ended + max(0, stopped.stopping - still), still)


def _num_open(transport: Transport, target: BatchRow | JobRow) -> int:
    if isinstance(target, JobRow):
        return int(transport.job(target.id).state not in TERMINAL_STATES)
    return transport.batch(target.id).counts.num_open
