"""Which kernels a piece of work spends the device's time on, and for how long the device works at all."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.timing import synchronize

#: profiles of all pieces of work stand in this file of the results
PROFILES = "gpu-profiles.txt"
#: runs of a piece of work under the profiler, and lines of its table
RUNS = 5
LINES = 16
#: what the profiler calls the device's work
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: seconds below which a pause of the device is the passage from one kernel to the next
SHORT_S = 10e-6
#: seconds between two looks at whether measuring should go on
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Busy:
    """How much of a process' time its device worked."""

    #: from the first to the last moment of measuring
    wall_s: float
    #: the union of all kernels and copies
    busy_s: float
    #: what lies between two of these less than `SHORT_S` apart: nobody on the host is waited for
    short_gaps_s: float
    num_kernels: int


def write_profile(directory: Path, name: str, work: Callable[[], object], device: torch.device) -> None:
    """Append the table of the costliest kernels of `work` to the profiles in `directory`."""
    synchronize(device)
    with profile(activities=_activities(device)) as recorded:
        for _ in range(RUNS):
            work()
        synchronize(device)
    events = recorded.key_averages()
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / PROFILES).open("a", encoding="utf-8") as file:
        file.write(f"== {name} ({RUNS} runs)\n{events.table(sort_by=order, row_limit=LINES)}\n\n")


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def short_gaps_s(spans: Iterable[tuple[float, float]], below_s: float = SHORT_S) -> float:
    """Seconds of all pauses between the (start, end) spans that are shorter than `below_s`."""
    total, reached = 0.0, float("inf")
    for start, end in sorted(spans):
        if 0.0 < start - reached < below_s:
            total += start - reached
        reached = end if reached == float("inf") else max(reached, end)
    return total


def device_spans(trace: Path) -> list[tuple[float, float]]:
    """(start, end) in seconds of all work of the device in a trace that torch's profiler wrote."""
    events: list[dict[str, Any]] = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events if event.get("cat") in DEVICE_WORK
    ]


class BusyMeter:
    """Measures how busy this process' device is, from another process' word to its next one.

    While `<path>.on` exists the device is watched, and `<path>.begun` says that it is; when the former goes, `path` is
    written: a `Busy` as JSON. A thread of this process sees to that. Without a CUDA device there is no device's work.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        threading.Thread(target=self._watch, name="busy-meter", daemon=True).start()

    def _watch(self) -> None:
        switch, _ = signs_of(self._path)
        while True:
            while not switch.exists():
                time.sleep(_LOOK_S)
            busy = self._measure()
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(busy)), encoding="utf-8")
            partial.rename(self._path)

    def _measure(self) -> Busy:
        switch, begun = signs_of(self._path)
        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        with profile(activities=[activity]) as recorded:
            began = time.perf_counter()
            begun.touch()
            while switch.exists():
                time.sleep(_LOOK_S)
            wall_s = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory) / "trace.json"
            recorded.export_chrome_trace(str(trace))
            spans = device_spans(trace)
        return Busy(wall_s, union_s(spans), short_gaps_s(spans), len(spans))


def signs_of(path: Path) -> tuple[Path, Path]:
    """The file that makes a `BusyMeter` measure, and the one that says that it does."""
    return path.with_name(f"{path.name}.on"), path.with_name(f"{path.name}.begun")
