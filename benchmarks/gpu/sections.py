"""Running sections so that one that fails, hangs or breaks the device's state does not end the others.

Sections run in another process, one after the other. What they have measured is here at once; where one ends early, or
does not end in time, its process ends with it, and a new one goes on with the next section.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from typing import Literal

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.end_to_end import auto_rows, end_to_end_rows, idle_rows, nf4_rows
from benchmarks.gpu.equality import equality_rows
from benchmarks.gpu.exact import exact_rows
from benchmarks.gpu.micro import draft_rows, head_rows, tail_rows
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.smollm2 import smollm2_rows
from benchmarks.gpu.uncut import quieten
from benchmarks.gpu.whole import whole_rows

Sections = Mapping[str, Callable[[Bench], Iterator[Row]]]

#: those that need the device alone come first
SECTIONS: Sections = {
    "draft": draft_rows,
    "head": head_rows,
    "tail": tail_rows,
    "equality": equality_rows,
    "exact": exact_rows,
    "whole": whole_rows,
    "e2e": end_to_end_rows,
    "idle": idle_rows,
    "auto": auto_rows,
    "nf4": nf4_rows,
    "smollm2": smollm2_rows,
}
#: those that may go on with the running system of the one before
ON_SYSTEMS = frozenset({"e2e", "idle", "auto", "nf4"})
#: seconds beyond its limit after which a section's process is killed
PATIENCE_S = 30


class TooLong(Exception):
    """A section did not end in its time."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A section begins."""

    section: str


def rows_of(
    sections: Sections, make: Callable[[], Bench], limit_s: int, start: Literal["fork", "spawn"]
) -> Iterator[Row]:
    """All rows of the sections, as they come; `make` is called in the sections' own process.

    `start`: a fork is there at once, but cannot use a GPU that this process has looked at.
    """
    left = dict(sections)
    while left:
        yield from _rows_of_process(left, make, limit_s, _context(start))


def _context(start: Literal["fork", "spawn"]) -> ForkContext | SpawnContext:
    return multiprocessing.get_context("fork") if start == "fork" else multiprocessing.get_context("spawn")


def _rows_of_process(
    left: dict[str, Callable[[Bench], Iterator[Row]]],
    make: Callable[[], Bench],
    limit_s: int,
    context: ForkContext | SpawnContext,
) -> Iterator[Row]:
    """Rows of as many sections as one process comes through; takes at least one from `left`."""
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, dict(left), make, limit_s))
    process.start()
    sending.close()
    section, begun, deadline = next(iter(left)), False, time.monotonic() + limit_s + PATIENCE_S
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            message = receiving.recv()
            if isinstance(message, _Begun):
                section, begun, deadline = message.section, True, time.monotonic() + limit_s + PATIENCE_S
                del left[section]
            else:
                yield message
        yield Row(section, "ended early", None, note=f"killed after {limit_s + PATIENCE_S} s")
    except EOFError:
        process.join(PATIENCE_S)
        if process.exitcode:
            yield Row(section, "ended early", None, note=f"its process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
    if not begun:
        del left[section]


def _work(sending: Connection, sections: Sections, make: Callable[[], Bench], limit_s: int) -> None:
    quieten()
    bench = make()
    try:
        for section, rows in sections.items():
            sending.send(_Begun(section))
            say(f"section {section}")
            if section not in ON_SYSTEMS:
                bench.systems.close()
            if not _run(bench, section, rows, limit_s, sending.send):
                return
            bench.clear()
    finally:
        bench.systems.close()
        sending.close()


def _run(
    bench: Bench,
    section: str,
    rows: Callable[[Bench], Iterator[Row]],
    limit_s: int,
    send: Callable[[Row], None],
) -> bool:
    """Whether the section came to its end; what ended it early stands in its last row."""
    try:
        with _limited(limit_s):
            for row in rows(bench):
                # a rehearsal misses no target
                send(replace(row, wanted="") if bench.rehearsal else row)
    except Exception as error:  # noqa: BLE001 the other sections shall run all the same
        say(traceback.format_exc())
        text = " ".join(str(error).split())[:300].replace("|", "/")
        send(Row(section, "ended early", None, note=f"{type(error).__name__}: {text}"))
        return False
    return True


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TooLong in this thread after so many seconds."""

    def over(number: int, frame: object) -> None:
        raise TooLong(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
