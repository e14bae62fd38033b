"""Running sections so that one that fails, hangs or breaks the device's state does not end the others.

Sections run in forked processes: what they have measured is here at once, and a process that does not end in time is
killed. This process must not touch the GPU, for a fork could not use it then.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.end_to_end import auto_rows, end_to_end_rows, idle_rows, nf4_rows
from benchmarks.gpu.equality import equality_rows
from benchmarks.gpu.micro import draft_rows, head_rows, tail_rows
from benchmarks.gpu.progress import say
from benchmarks.gpu.rows import Row
from benchmarks.gpu.smollm2 import smollm2_rows
from benchmarks.gpu.whole import whole_rows

#: those that need the device alone come first
SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "draft": draft_rows,
    "head": head_rows,
    "tail": tail_rows,
    "equality": equality_rows,
    "whole": whole_rows,
    "e2e": end_to_end_rows,
    "idle": idle_rows,
    "auto": auto_rows,
    "nf4": nf4_rows,
    "smollm2": smollm2_rows,
}
#: those that go on with the running system of the one before, so in the same process
ON_SYSTEMS = frozenset({"e2e", "idle", "auto", "nf4"})
#: seconds beyond its limit after which a section's process is killed
PATIENCE_S = 30
#: a forked process has every library imported
_FORK = multiprocessing.get_context("fork")


class TooLong(Exception):
    """A section did not end in its time."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A section begins."""

    section: str


def rows_of(chosen: Sequence[str], make: Callable[[], Bench], limit_s: int) -> Iterator[Row]:
    """All rows of the chosen sections, as they come; `make` is called in the sections' own processes."""
    for group in _groups(chosen):
        yield from _rows_of_group(group, make, limit_s)


def _groups(chosen: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for section in chosen:
        if groups and section in ON_SYSTEMS and groups[-1][-1] in ON_SYSTEMS:
            groups[-1].append(section)
        else:
            groups.append([section])
    return groups


def _rows_of_group(group: Sequence[str], make: Callable[[], Bench], limit_s: int) -> Iterator[Row]:
    receiving, sending = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(sending, group, make, limit_s))
    process.start()
    sending.close()
    left, section, deadline = list(group), group[0], time.monotonic() + limit_s + PATIENCE_S
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            message = receiving.recv()
            if isinstance(message, _Begun):
                section, deadline = message.section, time.monotonic() + limit_s + PATIENCE_S
                left.remove(section)
            else:
                yield message
        yield Row(section, "ended early", None, note=f"killed after {limit_s + PATIENCE_S} s")
    except EOFError:
        process.join()
        if process.exitcode:
            yield Row(section, "ended early", None, note=f"its process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
    for other in left:
        yield Row(other, "not run", None, note=f"{section} ended early")


def _work(sending: Connection, group: Sequence[str], make: Callable[[], Bench], limit_s: int) -> None:
    bench = make()
    try:
        for section in group:
            sending.send(_Begun(section))
            say(f"section {section}")
            _run(bench, section, limit_s, sending.send)
    finally:
        bench.systems.close()
        sending.close()


def _run(bench: Bench, section: str, limit_s: int, send: Callable[[Row], None]) -> None:
    """What ends the section early stands in its last row."""
    try:
        with _limited(limit_s):
            for row in SECTIONS[section](bench):
                # a rehearsal misses no target
                send(replace(row, wanted="") if bench.rehearsal else row)
    except Exception as error:  # noqa: BLE001 the other sections shall run all the same
        say(traceback.format_exc())
        text = " ".join(str(error).split())[:300].replace("|", "/")
        send(Row(section, "ended early", None, note=f"{type(error).__name__}: {text}"))
        bench.systems.close()
    bench.clear()


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
