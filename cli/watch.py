"""A batch being watched: a live line on a terminal or below a notebook's cell, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.client.voice import Display, Snapshot
from cli.manner import is_quiet
from cli.output import console, duration, figure, style_of
from storage.batch_records import Counts

#: seconds between two plain lines while something changes, and while nothing does
LINE_S = 5.0
SILENCE_S = 60.0
#: cells of the bar on a terminal, and what of its line a narrow one does without
_BAR_CELLS = 14
_PARTS = frozenset({"now", "overall"})
#: length of a notebook's bar
BAR_CELLS = 20


def line_of(snapshot: Snapshot) -> str:
    """A snapshot as one line of text."""
    counts = snapshot.counts
    ends = ", ".join(f"{number} {name}" for name, number in snapshot.not_done.items())
    return (
        f"{counts.num_ended}/{counts.total} done, {ends}, {counts.running} {_going(snapshot)}, "
        f"{figure(snapshot.tps_now)} tok/s now, {figure(snapshot.tps_overall)} overall, {_time(snapshot)}"
    )


def _going(snapshot: Snapshot) -> str:
    return "stopping" if snapshot.stopping else "running"


def _time(snapshot: Snapshot) -> str:
    """What it takes until the end, or what it took."""
    if not snapshot.counts.num_open:
        return f"took {duration(snapshot.elapsed_s)}"
    return f"ETA {duration(snapshot.eta_s)}"


class LiveDisplay:
    """One line at the bottom of a terminal, redrawn."""

    def __init__(self) -> None:
        self._live = Live(console=console(sys.stderr), auto_refresh=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(_Line(snapshot), refresh=True)

    def say(self, message: str) -> None:
        self._live.console.print(message, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class NotebookDisplay:
    """One line below a notebook's cell, redrawn by what every notebook has: no widgets."""

    def __init__(self) -> None:
        from IPython.display import display

        self._shown = ""
        self._handle = display({"text/plain": self._shown}, raw=True, display_id=True)

    def show(self, snapshot: Snapshot) -> None:
        counts = snapshot.counts
        full = BAR_CELLS * counts.num_ended // max(counts.total, 1)
        text = f"{'█' * full}{'░' * (BAR_CELLS - full)} {line_of(snapshot)}"
        if text != self._shown:
            self._shown = text
            self._handle.update({"text/plain": text}, raw=True)

    def say(self, message: str) -> None:
        click.echo(message, err=True)

    def close(self) -> None:
        """The last line stays."""


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
        self._write(line_of(snapshot))
        self._last = (snapshot.elapsed_s, snapshot.counts)

    def say(self, message: str) -> None:
        self._write(message)

    def close(self) -> None:
        """Nothing is left open."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A snapshot with a bar, on one line however narrow the terminal is when it is drawn."""

    snapshot: Snapshot

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        counts, room = self.snapshot.counts, options.max_width - _BAR_CELLS - 1
        # what people miss least goes first
        choices = (_text(self.snapshot, parts) for parts in (_PARTS, _PARTS - {"overall"}, frozenset[str]()))
        fitting = next((text for text in choices if text.cell_len <= room), None)
        if fitting is None:
            yield _text(self.snapshot, frozenset())
            return
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(ProgressBar(total=max(counts.total, 1), completed=counts.num_ended, width=_BAR_CELLS), fitting)
        yield grid


def _text(snapshot: Snapshot, parts: frozenset[str]) -> Text:
    counts = snapshot.counts
    text = Text(f"{counts.num_ended}/{counts.total}", no_wrap=True, overflow="ellipsis")
    for name, number in snapshot.not_done.items():
        text.append(f"  {number} {name}", style=style_of(name) if number else "dim")
    text.append(f"  {counts.running} {_going(snapshot)}", style="cyan" if counts.running else "dim")
    if "now" in parts:
        text.append(f"  {figure(snapshot.tps_now)} tok/s now")
    if "overall" in parts:
        text.append(f", {figure(snapshot.tps_overall)} overall")
    text.append(f"  {_time(snapshot)}", style="dim")
    return text


def make_display() -> Display:
    """The display that fits: a line that is redrawn only where somebody looks at a notebook or a terminal."""
    if is_quiet():
        return PlainDisplay(lambda line: None)
    if console(sys.stderr).is_jupyter:
        return NotebookDisplay()
    if sys.stderr.isatty() and not console(sys.stderr).is_dumb_terminal:
        return LiveDisplay()
    return PlainDisplay(lambda line: click.echo(line, err=True))
