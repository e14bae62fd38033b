"""Computations recorded once per shape and replayed: a CUDA graph launches thousands of kernels as one.

A recorded computation reads and writes buffers at fixed addresses, so a forward of any size is padded to the next
recorded shape, its `Bucket`. Shapes are recorded when they are first needed; the ones not used for longest make room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.memory import is_out_of_memory

log = logging.getLogger(__name__)

#: recorded computations that one model keeps
MOST_GRAPHS = 24
#: numbers of rows that are recorded; above, multiples of the last one
ROWS = (1, 4, 16, 32, 64)
#: query lengths that are recorded: a base token with 0, 2, 4, 8, 16 drafted ones, two tokens, and chunks of prompts
QUERIES = (1, 2, 3, 5, 9, 17, 33, 64, 128, 256, 512)
#: cache lengths for which attention is recorded: these, and then twice these, and so on
LENGTHS = (1024, 1536)
#: torch captures one graph at a time in a process
_ONE_AT_A_TIME = threading.Lock()
#: runs before a recording, so that libraries and kernels have set themselves up
_WARM_UPS = 2


class Bucket(NamedTuple):
    """A shape that is recorded."""

    rows: int
    query: int
    #: no token stands at this cache position or beyond
    longest: int


class Key(NamedTuple):
    """Which computation, in which shape."""

    kind: str
    bucket: Bucket
    #: what else it depends on
    variant: Hashable = None

    def __str__(self) -> str:
        rows, query, longest = self.bucket
        return f"{self.kind} of {rows} × {query} tokens up to {longest}"


def bucket_of(rows: int, query: int, longest: int, *, max_query: int, capacity: int) -> Bucket:
    """The smallest recorded shape that holds a forward; `query` ≤ `max_query`, `longest` ≤ `capacity`."""
    most = next((length for length in QUERIES if length >= query), max_query)
    end, scale = longest + most - query, 1
    while end > LENGTHS[-1] * scale:
        scale *= 2
    length = next(length * scale for length in LENGTHS if length * scale >= end)
    num_rows = next((number for number in ROWS if number >= rows), -(-rows // ROWS[-1]) * ROWS[-1])
    return Bucket(num_rows, min(most, max_query), min(length, capacity))


class Recorder(Protocol):
    """How a computation is recorded."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What replays `compute`; it may run it, too."""


class CudaRecorder:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time.

    What cannot be captured is computed anew each time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Its own: torch would capture on a stream of the device that recorded first in this process.
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            usual = torch.cuda.current_stream(self._device)
            self._side.wait_stream(usual)
            with torch.cuda.stream(self._side):
                for _ in range(_WARM_UPS):
                    compute()
            usual.wait_stream(self._side)
            try:
                return self._captured(compute)
            except RuntimeError as error:
                for each in (error, error.__context__):
                    if each is not None and is_out_of_memory(each):
                        raise each from None
                log.warning("computed step by step, for it cannot be recorded: %s", str(error).splitlines()[0])
                return compute

    def _captured(self, compute: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # other threads may use another device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            compute()
        return graph.replay


class NoRecorder:
    """Runs the computation each time: the same padding and buffers where there is nothing to record."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute


def current(device: torch.device) -> AbstractContextManager[object]:
    """The thread's current device, where kernels of our own are started, is this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def recorder_for(device: torch.device) -> Recorder:
    """The recorder of a device."""
    return CudaRecorder(device) if device.type == "cuda" else NoRecorder()


@dataclass(slots=True)
class Graph:
    """A recorded computation and its buffers."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    replay: Callable[[], None]
    #: what those inputs were made of that seldom change, so that they need not be made and copied again
    remembered: object = None

    @torch.inference_mode()
    def run(self, **values: Tensor) -> Mapping[str, Tensor]:
        """Replay with these values, each of its buffer's shape or shorter in front; the outputs, until the next run.

        What stands behind a shorter value is what it was.
        """
        remembered, self.remembered = self.remembered, None  # until all of it has arrived
        for name, value in values.items():
            buffer = self.inputs[name]
            (buffer if len(value) == len(buffer) else buffer[: len(value)]).copy_(value, non_blocking=True)
        self.replay()
        self.remembered = remembered
        return self.outputs


class Graphs:
    """The recorded computations of one model."""

    def __init__(self, recorder: Recorder, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self._recorder = recorder
        self._device = device
        self._most = most
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def get(
        self, key: Key, inputs: Callable[[], dict[str, Tensor]], compute: Callable[..., dict[str, Tensor]]
    ) -> Graph:
        """The computation of this key; recorded now, if it is not there, over what `inputs` makes.

        `compute` takes the inputs by name and returns its outputs by name. It must not depend on values, only on
        shapes, and its first runs happen on the inputs as they were made.
        """
        graph = self._graphs.get(key)
        if graph is None:
            while len(self._graphs) >= self._most:
                self._graphs.popitem(last=False)
            began = time.perf_counter()
            with current(self._device):
                graph = self._graphs[key] = self._record(inputs(), compute)
            log.info("recorded %s in %.1f s", key, time.perf_counter() - began)
        self._graphs.move_to_end(key)
        return graph

    def _record(self, inputs: dict[str, Tensor], compute: Callable[..., dict[str, Tensor]]) -> Graph:
        # one run outside shows the outputs' shapes; the pool's memory may be overwritten by other graphs' runs
        outputs = {name: torch.empty_like(value) for name, value in compute(**inputs).items()}

        def store() -> None:
            for name, value in compute(**inputs).items():
                outputs[name].copy_(value)

        return Graph(inputs, outputs, self._recorder.record(store))
