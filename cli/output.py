"""How things are shown: tables, JSON, figures. Respects NO_COLOR and fits 80 columns when piped."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from cli.control_characters import visible, visible_lines
from cli.destination import stdout_for_programs
from cli.manner import is_quiet
from tasks.json_text import json_text

#: what stands where there is no figure
NOTHING = "–"
#: cells of a terminal that a text keeps in any table, and cells between two columns
LEAST_TEXT = 12
_GAP = 2


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # what is being handled; rich would end the process with a status of its own


def console(out: TextIO | None = None) -> Console:
    """A console for this stream, stdout by default: colours only on a terminal, 80 columns elsewhere.

    NO_COLOR takes them away, bold and dim included, and goes before FORCE_COLOR, which keeps them in pipes.
    """
    plain = bool(os.environ.get("NO_COLOR"))
    return _Console(file=out, highlight=False, emoji=False, markup=False, color_system=None if plain else "auto")


def warn(message: str) -> None:
    """A remark on stderr that stops nothing; none with --quiet."""
    if not is_quiet():
        click.echo(f"Warning: {visible_lines(message)}", err=True)


def note(message: str) -> None:
    """What is going on, on stderr: stdout is for results; nothing with --quiet."""
    if not is_quiet():
        click.echo(visible_lines(message), err=True)


def print_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    click.echo(json_text(value, indent=2), file=stdout_for_programs())


def print_values(values: Mapping[str, str | None]) -> None:
    """A line for each value that there is, behind its name."""
    for name, value in values.items():
        if value is not None:
            click.echo(f"{name:<14} {visible(value)}")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Iterable[str] = (),
    ids: Iterable[str] = (),
    whole: Iterable[str] = (),
    out: TextIO | None = None,
) -> None:
    """Rows under column names; columns in `numbers`, which are aligned right, and in `whole` are never cut.

    Texts that do not fit the width are cut, the longest first, at their end or, in the columns of `ids`, in the middle:
    ids often begin alike. None is cut below `LEAST_TEXT`: a table that needs more than the width is wider.
    """
    right, in_the_middle = set(numbers), set(ids)
    cells = [[_cell(value) for value in row] for row in rows]
    natural = {name: max(map(cell_len, [name, *(row[n].plain for row in cells)])) for n, name in enumerate(columns)}
    screen = console(out)
    widths = _fitting(natural, right.union(whole), screen.width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name, width in widths.items():
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for row in cells:
        table.add_row(
            *(
                Text(without_middle(cell.plain, widths[name])) if name in in_the_middle else cell
                for name, cell in zip(columns, row, strict=True)
            )
        )
    screen.width = max(screen.width, _with_gaps(widths))
    screen.print(table)


def _fitting(natural: Mapping[str, int], whole: Collection[str], width: int) -> dict[str, int]:
    """The columns' widths in a table of this width: all are cut but those in `whole`."""
    most = max(natural.values())
    widths = dict(natural)
    while most > LEAST_TEXT and _with_gaps(widths) > width:
        most -= 1
        widths = {name: cells if name in whole else min(cells, most) for name, cells in natural.items()}
    return widths


def _with_gaps(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def without_middle(text: str, width: int) -> str:
    """The text in so many cells of a terminal, beginning and end of it if it is longer."""
    if cell_len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{set_cell_size(text, width - 1 - end)}…{set_cell_size(text[::-1], end)[::-1]}"


def _cell(value: object) -> Text:
    return value if isinstance(value, Text) else Text(NOTHING if value is None else visible(str(value)))


#: colour of a state
_STYLES = {
    "completed": "green",
    "failed": "red",
    "expired": "red",
    "cancelled": "yellow",
    "cancelling": "yellow",
    "in_progress": "cyan",
    "running": "cyan",
    "ok": "green",
    "skipped": "dim",
    "warning": "yellow",
}


def state(name: str) -> Text:
    """A state in its colour."""
    return Text(name, style=style_of(name))


def style_of(name: str) -> str:
    """The colour of a state."""
    return _STYLES.get(name, "")


def figure(value: float | None, digits: int = 1) -> str:
    """A number with fixed digits, or the sign for none."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def percent(part: int, whole: int) -> str:
    """A share in whole percent, or the sign for none."""
    return NOTHING if whole == 0 else f"{100 * part / whole:.0f}%"


def counted(number: int, noun: str) -> str:
    """`1 job`, `2 jobs`, `1,000 jobs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float | None) -> str:
    """A duration as people say it: `8s`, `3m05s`, `2h10m`, `30d06h`."""
    if seconds is None:
        return NOTHING
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 2 * 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def moment(timestamp: float | None) -> str:
    """A Unix time as local date and time with seconds and zone: `2026-11-30 21:05:07+01:00`."""
    if timestamp is None:
        return NOTHING
    return datetime.fromtimestamp(timestamp).astimezone().isoformat(sep=" ", timespec="seconds")


def size(num_bytes: float) -> str:
    """Bytes as people read them."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the loop returns at GB")


def first_words(text: str | None, width: int) -> str:
    """The beginning of a text on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= width else line[: width - 1] + "…"
