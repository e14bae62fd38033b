"""A tail in the head's own process: no server, no bytes, no second thread. Implements the head's side of the relay.

The engines are those of a split pair, and so are the frames. A frame's hidden states stay on the device, and the tail
works on it in the thread that asks for the verdict: two threads would only take turns at the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from relay.messages import Downward, Hello, Upward, Welcome
from relay.transport import Lease, Received, TailInfo
from workers.engine.shard import TailShard
from workers.engine.slottables import SlotTables
from workers.tail.engine import TailEngine
from workers.tail.gauge import TailGauge
from workers.tail.line import Line
from workers.tail.worker import answer_next


class DirectLink:
    """Implements `transport.HeadLink`. Frames have no size; what the tail's half raises comes out of `receive`."""

    max_frame_bytes: int | None = None

    def __init__(self, engine: TailEngine, gauge: TailGauge, welcome: Welcome) -> None:
        self._engine = engine
        self._gauge = gauge
        self._line = Line()
        self._answers: deque[Received[Downward]] = deque([_arrived(0, welcome)])
        self._woken = threading.Event()

    def send(self, lane: int, message: Upward) -> int:
        """The frame waits for the next `receive`."""
        if isinstance(message, Hello):
            raise ValueError("an epoch is opened once")
        self._line.put(Received(lane, message, 0, time.perf_counter()))
        return 0

    def receive(self, timeout_s: float) -> Received[Downward] | None:
        """The next verdict, worked out now if need be; with nothing to work on, waits for `wake`."""
        if not self._answers and self._line:
            answers = answer_next(self._line, self._engine)
            self._answers.extend(_arrived(lane, self._gauge.marked(verdict)) for lane, verdict in answers)
        if self._answers:
            return self._answers.popleft()
        if self._woken.wait(timeout_s):
            self._woken.clear()
        return None

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._line = Line()


@dataclass(frozen=True, slots=True)
class DirectLease:
    """Implements `transport.Lease`: this tail is nobody else's, and ends with us."""

    tail: TailInfo
    epoch: int

    def held(self) -> bool:
        return True

    def release(self) -> None: ...


class DirectRelay:
    """Implements `transport.HeadRelay` for the one tail of this process."""

    def __init__(self, tail: TailInfo, shard: TailShard) -> None:
        self._tail = tail
        self._shard = shard
        # as long-lived as the half: recorded computations read them
        self._tables = SlotTables(shard.slots, shard.vocab_size, shard.device)
        self._gauge = TailGauge(shard.device)
        self._epoch = 0

    def tails(self) -> list[TailInfo]:
        return [self._tail]

    def lease(self, head: str, tail: TailInfo) -> Lease | None:
        self._epoch += 1
        return DirectLease(tail, self._epoch)

    def connect(self, lease: Lease, hello: Hello) -> DirectLink:
        """The tail accepts at once."""
        engine = TailEngine(self._shard, slots=hello.slots, max_query=hello.max_query, tables=self._tables)
        return DirectLink(engine, self._gauge, Welcome(lease.tail.tail, hello.epoch))


def _arrived(lane: int, message: Downward) -> Received[Downward]:
    return Received(lane, message, 0, time.perf_counter())
