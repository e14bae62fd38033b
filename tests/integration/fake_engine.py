"""An engine without a model: finishes each job a fixed time after it got one of the slots.

Also a head process of its own for tests that kill it:
`python -m tests.integration.fake_engine URL DELAY_S [SLOTS [MODEL]]`.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections import deque

import redis

from tasks import keys
from tasks.generation import FinishReason, GenerationTask, Metrics, Outcome
from workers.head.channel import EngineServer, private_address
from workers.head.fronts import Fronts
from workers.settings import HeadSettings

AUTHKEY = b"a key that only this test knows."
MODEL = "model"
HEAD = "head"


def outcome_of(task: GenerationTask, started: float) -> Outcome:
    """A finished text that names its job."""
    now = time.time()
    metrics = Metrics(started, now, 0.1, 31.456, 4, 2.5, 16, 10, 0, 1000, 100, 0.1, 0.2, 0.3, 0.4)
    text = f"text of {task.job}"
    return Outcome(task.job, task.attempt, HEAD, text, (5, 6), FinishReason.STOP, 7, None, None, metrics)


class FakeEngine:
    """`slots` jobs at a time, `delay_s` seconds each (None: until `release`). One thread."""

    def __init__(self, address: str, slots: int = 64, delay_s: float | None = 0.1) -> None:
        self.address = address
        self.delay_s = delay_s
        #: task ids in the order of their delivery, and Unix times at which jobs got their slots
        self.delivered: list[str] = []
        #: those of them that were said to be suspects
        self.suspects: set[str] = set()
        self.start_times: list[float] = []
        self._slots = slots
        self._changed = threading.Condition()
        self._waiting: deque[GenerationTask] = deque()
        self._running: list[tuple[float, int, GenerationTask, float]] = []
        self._closing = False
        self.server = EngineServer(address, AUTHKEY, self._deliver)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Finish everything at once from now on."""
        with self._changed:
            self.delay_s = 0.0
            self._running = [(0.0, *entry[1:]) for entry in self._running]
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.server.close()

    def _deliver(self, task: GenerationTask, suspect: bool) -> None:
        with self._changed:
            self.delivered.append(task.task_id)
            if suspect:
                self.suspects.add(task.task_id)
            self._waiting.append(task)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                started, finished = self._turn(time.time())
                if not started and not finished:
                    next_end = self._running[0][0] - time.time() if self._running else 3600
                    self._changed.wait(min(max(next_end, 0.001), 3600))
            for task in started:
                self.server.started(task.task_id)
            for task, at in finished:
                self.server.progress(task.task_id, 2, 31.456)
                self.server.finish(task.task_id, outcome_of(task, at))

    def _turn(self, now: float) -> tuple[list[GenerationTask], list[tuple[GenerationTask, float]]]:
        finished = []
        while self._running and self._running[0][0] <= now:
            _, _, task, at = heapq.heappop(self._running)
            finished.append((task, at))
        started = []
        while self._waiting and len(self._running) < self._slots:
            task = self._waiting.popleft()
            end = now + (3600 if self.delay_s is None else self.delay_s)
            heapq.heappush(self._running, (end, len(self.start_times), task, now))
            self.start_times.append(now)
            started.append(task)
        return started, finished


def main(url: str, delay_s: str, slots: str = "64", model: str = MODEL) -> None:
    """A head that consumes at once and runs until it is killed."""
    with private_address() as address:
        engine = FakeEngine(address, int(slots), float(delay_s) if float(delay_s) >= 0 else None)
        settings = HeadSettings(model=model, broker_url=url, head_id=HEAD)
        redis.Redis.from_url(url).set(keys.head(HEAD), "alive")
        Fronts(settings, address, AUTHKEY, model=model, count=2, concurrency_total=8, grace_s=0.5)
        engine.server.set_consuming(True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
