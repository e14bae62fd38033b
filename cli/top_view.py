"""How `shardq top` shows a reading: three tables that fit 80 × 24, and more where there is room."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.control_characters import visible
from cli.output import NOTHING, counted, duration, figure, size
from cli.top_reading import Reading
from tasks.figures import HeadFigures
from tasks.heads import HeadInfo

#: columns from which more is shown
WIDE = 110
#: lines that are not rows of the tables
_LINES_AROUND = 11
#: obstacles shown at most: more than that have one cause
_MOST_OBSTACLES = 3
#: rows of a table at least, however low the screen
_FEWEST_ROWS = 2


def view(reading: Reading, *, width: int, height: int | None = None) -> RenderableType:
    """The screen; of long tables what fits `height`, all of them for None."""
    warnings = [Text(visible(line), style="yellow") for line in reading.obstacles[:_MOST_OBSTACLES]]
    around = _LINES_AROUND + sum(1 + len(line) // width for line in warnings)
    most = None if height is None else max(_FEWEST_ROWS, (height - around) // 3)
    wide = width >= WIDE
    return Group(
        _summary(reading),
        *warnings,
        Text(),
        _heads(reading, most, wide=wide),
        Text(),
        _tails(reading, most),
        Text(),
        _queues(reading, most),
    )


def _summary(reading: Reading) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    if reading.bookkeeper:
        text.append("bookkeeper at work", style="green")
        text.append(f", {counted(reading.unrecorded, 'record')} behind")
    else:
        text.append("no bookkeeper", style="red")
        text.append(": start one with `shardq bookkeeper`")
    limit = f" of {size(reading.memory_max)}" if reading.memory_max else ""
    text.append(f"   queue {size(reading.memory_used)}{limit}")
    text.append(f"   {sum(head.tokens_per_s for head in reading.heads):,.1f} tok/s", style="bold")
    return text


def _heads(reading: Reading, most: int | None, *, wide: bool) -> Table:
    more = ("DRAFTER", "QUEUED", "DRAFT/HEAD/LINK/TAIL", "SENT") if wide else ()
    columns = ("HEAD", "SLOTS", "LANES", "TOK/S", "ACC", "T/RND", "RTT", "MBIT/S", "GPU", *more, "MODEL")
    rows = [_head(head, wide=wide) for head in reading.heads]
    return _table(columns, rows, most, none="no head is alive: start one with `shardq head`", left=("DRAFTER",))


def _head(head: HeadInfo, *, wide: bool) -> list[Text | str]:
    figures = head.figures
    name = Text(visible(head.head_id), style="" if head.consuming else "yellow")
    slots, rate = f"{head.running}/{head.slots}", figure(head.tokens_per_s)
    if figures is None:
        return [name, slots, NOTHING, rate, *[NOTHING] * (9 if wide else 5), head.model]
    rtt = NOTHING if figures.rtt_ms is None else f"{figures.rtt_ms:.0f}ms"
    acceptance = NOTHING if figures.acceptance is None else f"{100 * figures.acceptance:.0f}%"
    narrow = [
        *(name, slots, f"{figures.lanes}/{figures.max_lanes}", rate, acceptance),
        *(figure(figures.tokens_per_round), rtt, figure(figures.mbit_per_s_up, 0)),
        _share(figures.gpu_used_bytes, figures.gpu_total_bytes),
    ]
    more = (figures.drafter, str(figures.waiting), _split(figures), size(figures.bytes_up_total)) if wide else ()
    return [*narrow, *more, head.model]


def _split(figures: HeadFigures) -> str:
    """Where the seconds of all frames went, in percent."""
    steps = (figures.draft_s_total, figures.head_s_total, figures.link_s_total, figures.tail_s_total)
    total = sum(steps)
    return "/".join(f"{100 * step / total:.0f}" for step in steps) + "%" if total else NOTHING


def _tails(reading: Reading, most: int | None) -> Table:
    rows: list[list[Text | str]] = []
    for head in reading.heads:
        if head.whole or head.figures is None or not head.figures.tail_id:
            continue
        told = head.figures.tail
        name = Text(visible(head.figures.tail_id), style="" if head.consuming else "yellow")
        if told is None:
            rows.append([name, *[NOTHING] * 5, head.head_id])
            continue
        busy = f"{100 * told.compute_s / told.uptime_s:.0f}%" if told.uptime_s else NOTHING
        gpu = _share(told.gpu_used_bytes, told.gpu_total_bytes)
        rows.append([name, f"{told.tokens:,}", f"{told.rows:,}", busy, gpu, duration(told.uptime_s), head.head_id])
    columns = ("TAIL", "TOKENS", "ROWS", "BUSY", "GPU", "SINCE", "OF HEAD")
    return _table(columns, rows, most, none="no head has a tail of its own")


def _queues(reading: Reading, most: int | None) -> Table:
    rows: list[list[Text | str]] = [
        [f"{depth.queued:,}", f"{depth.running:,}", f"{depth.slots:,}", depth.model] for depth in reading.queues
    ]
    return _table(("QUEUED", "RUNNING", "SLOTS", "MODEL"), rows, most, none="no model is served", left=())


def _share(used: int, total: int) -> str:
    return f"{100 * used / total:.0f}%" if total else NOTHING


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Text | str]],
    most: int | None,
    *,
    none: str,
    left: Sequence[str] = (),
) -> Table:
    """Figures to the right, names to the left; the last column takes what is left of the width."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    names = {columns[-1], "HEAD", "TAIL", *left}
    for index, name in enumerate(columns):
        last = index == len(columns) - 1
        table.add_column(
            name,
            justify="left" if name in names else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if last else None,
            max_width=None if last else 24,
        )
    shown = rows if most is None or len(rows) <= most else rows[: most - 1]
    for row in shown:
        table.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row))
    if len(shown) < len(rows):
        table.add_row(Text(f"and {len(rows) - len(shown)} more", style="dim"))
    if not rows:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row(Text(none, style="dim"))
    return table
