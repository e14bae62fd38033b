"""Watch a batch until it ends: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import click
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.manner import is_quiet
from cli.output import console, duration, figure, style_of
from storage.batch_records import Counts, Progress
from storage.database import Database
from storage.jobs import progress
from storage.states import TERMINAL_STATUSES, BatchStatus

#: seconds between two looks at the database
POLL_S = 0.5
#: seconds between two plain lines while something changes, and while nothing does
LINE_S = 5.0
SILENCE_S = 60.0
#: seconds over which "now" is measured
NOW_S = 15.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A batch at one moment of being watched."""

    counts: Counts
    completion_tokens: int
    #: since the batch was published
    elapsed_s: float
    #: completion tokens of ended jobs per second, lately (those of stopped jobs left out) and since the start
    tps_now: float | None
    tps_overall: float | None
    #: until the last job ends, at the rate so far
    eta_s: float | None
    #: the batch is being cancelled
    stopping: bool = False

    def line(self) -> str:
        """As one line of text."""
        counts = self.counts
        return (
            f"{counts.num_ended}/{counts.total} done, {self._ends()}, {counts.running} "
            f"{'stopping' if self.stopping else 'running'}, "
            f"{figure(self.tps_now)} tok/s now, {figure(self.tps_overall)} overall, "
            f"ETA {duration(self.eta_s)}"
        )

    def _ends(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in self.not_done.items())

    @property
    def not_done(self) -> dict[str, int]:
        """Jobs that ended without success, by state; failed ones also if there are none."""
        counts = self.counts
        stopped = {"cancelled": counts.cancelled, "expired": counts.expired}
        return {"failed": counts.failed, **{name: number for name, number in stopped.items() if number}}


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


class Display(Protocol):
    """Where snapshots are shown."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the newest."""

    def say(self, message: str) -> None:
        """A remark beside the progress."""

    def close(self) -> None:
        """Leave the last one standing."""


class LiveDisplay:
    """One line at the bottom of a terminal, redrawn."""

    def __init__(self) -> None:
        self._live = Live(console=console(sys.stderr), auto_refresh=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(_bar(snapshot), refresh=True)

    def say(self, message: str) -> None:
        self._live.console.print(message, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class PlainDisplay:
    """A line every few seconds while something changes: for pipes and log files."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last: tuple[float, Counts] | None = None

    def show(self, snapshot: Snapshot) -> None:
        if self._last is not None:
            shown_at, counts = self._last
            pause_s = LINE_S if counts != snapshot.counts else SILENCE_S
            if snapshot.counts.num_open and snapshot.elapsed_s - shown_at < pause_s:
                return
        self._write(snapshot.line())
        self._last = (snapshot.elapsed_s, snapshot.counts)

    def say(self, message: str) -> None:
        self._write(message)

    def close(self) -> None:
        """Nothing is left open."""


def _bar(snapshot: Snapshot) -> Table:
    counts = snapshot.counts
    grid = Table.grid(padding=(0, 1))
    text = Text(f"{counts.num_ended}/{counts.total}")
    for name, number in snapshot.not_done.items():
        text.append(f"  {number} {name}", style=style_of(name) if number else "dim")
    going = "stopping" if snapshot.stopping else "running"
    text.append(f"  {counts.running} {going}", style="cyan" if counts.running else "dim")
    text.append(f"  {figure(snapshot.tps_now)} tok/s now, {figure(snapshot.tps_overall)} overall")
    text.append(f"  ETA {duration(snapshot.eta_s)}", style="dim")
    grid.add_row(ProgressBar(total=max(counts.total, 1), completed=counts.num_ended, width=14), text)
    return grid


def make_display() -> Display:
    """The display that fits stderr: a line that is redrawn only where somebody looks at a terminal."""
    if is_quiet():
        return PlainDisplay(lambda line: None)
    if sys.stderr.isatty() and not console(sys.stderr).is_dumb_terminal:
        return LiveDisplay()
    return PlainDisplay(lambda line: click.echo(line, err=True))


def watch(
    database: Database,
    batch_id: str,
    started_at: float,
    display: Display,
    *,
    live_tps: Callable[[], float | None],
    on_poll: Callable[[Counts], None] = lambda _: None,
) -> Counts:
    """Show the batch until it has ended; its final counts. The caller closes the display."""
    pace = Pace(started_at)
    for report in _reports(database, batch_id, on_poll):
        display.show(pace.snapshot(time.time(), report, live_tps() if report.counts.num_open else None))
    return report.counts


def _reports(database: Database, batch_id: str, on_poll: Callable[[Counts], None]) -> Iterator[Progress]:
    while True:
        report = progress(database, batch_id)
        yield report
        if report.status in TERMINAL_STATUSES:
            return
        on_poll(report.counts)
        time.sleep(POLL_S)
