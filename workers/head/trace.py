"""What an engine did when, as a timeline to look at: `chrome://tracing` and ui.perfetto.dev open the file.

Spans of one lane and one name share a track; where two of them overlap (several prefill chunks under way), the
later one moves to a second track of that name. Times are those of `time.perf_counter`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from workers.errors import TraceUnwritable

log = logging.getLogger(__name__)

#: a trace stops growing at this many bytes
MAX_TRACE_BYTES = 1 << 30
#: what follows the newest event: the file is a whole JSON document at any time
_END = b"\n]\n"


class Trace(Protocol):
    """Where an engine writes what took how long. Calls come from the engine's thread and never raise."""

    def span(self, name: str, lane: int | None, start_s: float, end_s: float, **figures: float | str) -> None:
        """Something that lasted from `start_s` to `end_s` (`time.perf_counter`); call it when it has ended.

        `lane` None is the whole head. `figures` are shown beside the span: rows, tokens, bytes, …
        """

    def close(self) -> None:
        """No spans after this; safe to call twice."""


class NoTrace:
    """Writes nothing."""

    def span(self, name: str, lane: int | None, start_s: float, end_s: float, **figures: float | str) -> None: ...

    def close(self) -> None: ...


class ChromeTrace:
    """A file of Chrome trace events, complete after every span, also when the process is killed."""

    def __init__(self, path: Path | str, *, max_bytes: int = MAX_TRACE_BYTES) -> None:
        """Replaces what is at `path`; raises `TraceUnwritable`."""
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        #: (lane, name, how many of that name overlap) → when its last span ended
        self._tracks: dict[tuple[int | None, str, int], float] = {}
        #: the same → number of the track
        self._numbers: dict[tuple[int | None, str, int], int] = {}
        try:
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._end = os.write(self._file, b"[\n")
            self._append({"ph": "M", "name": "process_name", "args": {"name": "shardq head"}}, first=True)
        except OSError as error:
            raise TraceUnwritable(f"cannot write the trace {self._path}: {error.strerror}") from error

    def span(self, name: str, lane: int | None, start_s: float, end_s: float, **figures: float | str) -> None:
        """As `Trace.span`. The first problem with the file, or its full size, ends the trace."""
        with self._lock:
            if self._file is None:
                return
            try:
                track = self._track(name, lane, start_s, end_s)
                times = {"ts": round(start_s * 1e6, 1), "dur": round((end_s - start_s) * 1e6, 1)}
                self._append({"ph": "X", "name": name, "tid": track, **times, "args": figures})
            except OSError as error:
                self._stop(f"the trace {self._path} ends here: {error.strerror}")
            else:
                if self._end > self._max_bytes:
                    self._stop(f"the trace {self._path} ends here: it has reached {self._max_bytes} bytes")

    def close(self) -> None:
        with self._lock:
            self._stop(None)

    def _track(self, name: str, lane: int | None, start_s: float, end_s: float) -> int:
        """The number of the first track of this lane and name that is free at `start_s`."""
        overlap = 0
        while self._tracks.get((lane, name, overlap), start_s) > start_s:
            overlap += 1
        key = (lane, name, overlap)
        if key not in self._tracks:
            self._numbers[key] = len(self._numbers) + 1
            self._label(key)
        self._tracks[key] = end_s
        return self._numbers[key]

    def _label(self, key: tuple[int | None, str, int]) -> None:
        lane, name, overlap = key
        place = "head" if lane is None else f"lane {lane}"
        label = f"{place} · {name}" + (f" {overlap + 1}" if overlap else "")
        # tracks of a lane stand together, in the order in which they first appeared
        order = (0 if lane is None else lane + 1) * 1000 + self._numbers[key]
        self._append({"ph": "M", "name": "thread_name", "tid": self._numbers[key], "args": {"name": label}})
        self._append({"ph": "M", "name": "thread_sort_index", "tid": self._numbers[key], "args": {"sort_index": order}})

    def _append(self, event: Mapping[str, Any], *, first: bool = False) -> None:
        """One write puts the event over the file's end and the end behind it."""
        if self._file is None:
            return
        text = json.dumps({"pid": 1, **event}, separators=(",", ":"), ensure_ascii=False).encode()
        data = (b"" if first else b",\n") + text + _END
        if os.pwrite(self._file, data, self._end) < len(data):  # the disk is full: back to the last whole event
            os.ftruncate(self._file, self._end)
            os.pwrite(self._file, _END, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(data) - len(_END)

    def _stop(self, reason: str | None) -> None:
        if self._file is None:
            return
        if reason is not None:
            log.warning("%s", reason)
        os.close(self._file)
        self._file = None


def open_trace(path: str | None) -> Trace:
    """The trace for the setting `trace`: a file's path, or None for no trace. Raises `TraceUnwritable`."""
    return NoTrace() if path is None else ChromeTrace(path)
