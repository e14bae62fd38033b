"""Wait for a batch to end: its progress, and why nothing moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from cli.client.transport import Transport
from cli.client.voice import Display, Snapshot
from cli.errors import Unavailable
from cli.reasons import System, why_nothing_moves
from storage.batch_records import BatchRow, Counts, Progress
from storage.states import TERMINAL_STATES, TERMINAL_STATUSES, BatchStatus

#: seconds between two looks at a batch, and at a job
POLL_S = 0.5
JOB_POLL_S = 0.2
#: seconds over which "now" is measured
NOW_S = 15.0
#: seconds without progress after which the reasons are looked for, and between two looks
STALL_S = 20.0
#: seconds between two passes that carry out stops
PASS_S = 1.0


class Pace:
    """Turns a series of progress reports into rates."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        #: (time, tokens of jobs that were not stopped) of the last `NOW_S` seconds
        self._recent: deque[tuple[float, int]] = deque()
        self._ended_before: int | None = None
        self._watched_since = 0.0

    def snapshot(self, now: float, report: Progress, live_tps: float | None) -> Snapshot:
        """The rates at `now`. `live_tps`, if known, is what the heads say they commit right now."""
        counts, tokens = report.counts, report.completion_tokens
        if self._ended_before is None:
            self._ended_before, self._watched_since = counts.num_ended, now
        # Texts of stopped jobs come all at once, whenever they were written.
        self._recent.append((now, tokens - report.stopped_tokens))
        while self._recent[0][0] < now - NOW_S:
            self._recent.popleft()
        elapsed_s = max(now - self._started_at, 0.0)
        return Snapshot(
            counts=counts,
            completion_tokens=tokens,
            elapsed_s=elapsed_s,
            tps_now=self._rate_now() if live_tps is None else live_tps,
            tps_overall=tokens / elapsed_s if elapsed_s > 0 and tokens else None,
            eta_s=self._eta_s(now, counts),
            stopping=report.status == BatchStatus.CANCELLING,
        )

    def _rate_now(self) -> float | None:
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        return (after - before) / (last - first) if last > first else None

    def _eta_s(self, now: float, counts: Counts) -> float | None:
        if counts.num_open == 0:
            return 0.0
        ended = counts.num_ended - (self._ended_before or 0)
        watched_s = now - self._watched_since
        return counts.num_open * watched_s / ended if ended > 0 and watched_s > 0 else None


def obstacles(transport: Transport, batch: BatchRow, system: System | None = None) -> list[str]:
    """Why an open batch does not move, one line each with the next step; nothing if all is well.

    `system`: what lives now, if it was asked for already.
    """
    if not batch.counts.num_open or batch.status == BatchStatus.VALIDATING:
        return []
    models = transport.open_models(batch.id)
    stopping = batch.status == BatchStatus.CANCELLING
    return list(why_nothing_moves(system or transport.system(), batch.counts, stopping=stopping, models=models))


class StallWatch:
    """Says why nothing moves, once nothing has moved for a while."""

    def __init__(
        self,
        say: Callable[[str], None],
        why: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._why = why
        self._clock = clock
        self._since = clock()
        self._counts: Counts | None = None

    def __call__(self, counts: Counts) -> None:
        """Look at the newest counts."""
        now = self._clock()
        if counts != self._counts or counts.running:
            self._since, self._counts = now, counts
        elif now - self._since > STALL_S:
            self._since = now
            for reason in self._why():
                self._say(reason)


class StopPasses:
    """Carries stops out while one waits for them, so that an end comes without a bookkeeper, too."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._due = clock()

    def __call__(self) -> None:
        """A pass, if the last one was long enough ago."""
        if self._clock() >= self._due:
            self._due = self._clock() + PASS_S
            # Told when the cancel was decided; should it last, the stall watch tells again.
            with suppress(Unavailable):
                self._transport.carry_out_stops()


def follow(transport: Transport, batch: BatchRow, display: Display, on_poll: Callable[[], None] = lambda: None) -> None:
    """Show progress until the batch has ended, and say why if nothing moves. Closes the display.

    Of one that had ended before there is no progress to show.
    """
    if batch.status in TERMINAL_STATUSES:
        display.close()
        return
    stall = StallWatch(display.say, lambda: obstacles(transport, transport.batch(batch.id)))
    pace = Pace(batch.working_since or time.time())
    try:
        for report in _reports(transport, batch.id):
            live_tps = transport.tokens_per_s() if report.counts.num_open else None
            display.show(pace.snapshot(time.time(), report, live_tps))
            if report.status not in TERMINAL_STATUSES:
                on_poll()
                stall(report.counts)
    finally:
        display.close()


def _reports(transport: Transport, batch_id: str) -> Iterator[Progress]:
    while True:
        report = transport.progress(batch_id)
        yield report
        if report.status in TERMINAL_STATUSES:
            return
        time.sleep(POLL_S)


def wait_for_job(transport: Transport, job_id: str, say: Callable[[str], None], on_poll: Callable[[], None]) -> None:
    """Wait until the job has ended, and say why if nothing moves."""
    counts = Counts()
    stall = StallWatch(say, lambda: why_nothing_moves(transport.system(), counts))
    while (job := transport.job(job_id)).state not in TERMINAL_STATES:
        counts = Counts(**{job.state: 1})
        on_poll()
        stall(counts)
        time.sleep(JOB_POLL_S)
