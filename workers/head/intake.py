"""The door of the engine: tasks come in from any thread, tokenised jobs go out to the engine's own."""

from __future__ import annotations

import queue
from collections.abc import Callable

from tasks.generation import GenerationTask, Outcome
from workers.head.jobs import Job, rejected
from workers.head.prompts import PromptReader, PromptRejected


class Intake:
    """Tokenises in the caller's thread, so that a long prompt does not hold up a round."""

    def __init__(self, prompts: PromptReader, head_id: str) -> None:
        self._prompts = prompts
        self._head_id = head_id
        self._ready: queue.SimpleQueue[Job | Outcome] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever something has come."""
        self._wake = wake

    def deliver(self, task: GenerationTask) -> None:
        """Take a task. Thread-safe."""
        try:
            self._ready.put(self._prompts.read(task))
        except PromptRejected as error:
            self._ready.put(rejected(task, self._head_id, error.failure, str(error)))
        self._wake()

    def take(self) -> Job | Outcome | None:
        """The next job, or the outcome of a task whose prompt was refused; None when nothing waits."""
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    @property
    def num_waiting(self) -> int:
        """What waits to be taken, about."""
        return self._ready.qsize()
