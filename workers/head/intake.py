"""The door of the engine: tasks come in from any thread, tokenised jobs go out to the engine's own."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from tasks.generation import FailureType, GenerationTask, Outcome
from workers.head.background import Background
from workers.head.ensemble import Ensemble
from workers.head.prompts import PromptReader, PromptRejected

log = logging.getLogger(__name__)


class Intake:
    """Tokenises in the caller's thread, so that no prompt holds up a round.

    Long prompts have a thread of their own that reads one after another: whoever delivers them goes on at once, and the
    memory that they take meanwhile does not add up.
    """

    def __init__(self, prompts: PromptReader, head_id: str) -> None:
        self._prompts = prompts
        self._head_id = head_id
        self._ready: queue.SimpleQueue[Ensemble | Outcome] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._long = Background("long-prompts")

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever something has come."""
        self._wake = wake

    def deliver(self, task: GenerationTask, suspect: bool = False) -> None:
        """Take a task; a suspect one runs alone. Thread-safe."""
        if task.request.is_long:
            self._long.do(lambda: self._bring(task, suspect))
        else:
            self._bring(task, suspect)

    def _bring(self, task: GenerationTask, suspect: bool) -> None:
        self._ready.put(self._read(task, suspect))
        self._wake()

    def _read(self, task: GenerationTask, suspect: bool) -> Ensemble | Outcome:
        try:
            ensemble = self._prompts.read_all(task)
        except PromptRejected as error:
            return Outcome.unbegun(task, self._head_id, failure=error.failure, message=str(error))
        except Exception as error:  # templates and tokenizers may raise anything: that fails the one job
            log.exception("prompt not read", extra={"job": task.job})
            message = f"the prompt could not be read: {type(error).__name__}: {error}"
            return Outcome.unbegun(task, self._head_id, failure=FailureType.INTERNAL, message=message)
        for job in ensemble.jobs:
            job.suspect = suspect
        return ensemble

    def take(self) -> Ensemble | Outcome | None:
        """The next task's jobs, or the outcome of a task whose prompt was refused; None when nothing waits."""
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    @property
    def num_waiting(self) -> int:
        """What waits to be taken, about."""
        return self._ready.qsize()
