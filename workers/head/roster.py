"""The tasks that an engine has taken and not ended: where they come from, and who is told what becomes of them.

The engine keeps the slots; it empties a task's slots before a task leaves here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Protocol

from tasks.generation import FailureType, Outcome, StopReason
from workers.head.closing import Closing
from workers.head.ensemble import Ensemble
from workers.head.jobs import Job
from workers.head.shown import ShownTexts

log = logging.getLogger(__name__)

#: least time between two progress reports of a job
PROGRESS_EVERY_S = 2.0


class Source(Protocol):
    """Where an engine takes its jobs from; see `workers.head.intake.Intake`."""

    def take(self) -> Ensemble | Outcome | None: ...

    @property
    def num_waiting(self) -> int: ...


class Report(Protocol):
    """Where an engine tells what became of jobs. Calls come from the engine's thread and must not block."""

    def started(self, task_id: str) -> None: ...

    def progress(self, task_id: str, num_tokens: int, tps: float | None) -> None: ...

    def finish(self, task_id: str, outcome: Outcome) -> None: ...

    def hand_back(self, task_id: str) -> None: ...


class Roster:
    """For the engine's thread, but for `num_coming`, which any thread may ask."""

    def __init__(self, source: Source, report: Report, head_id: str, ends_at: float | None) -> None:
        """`ends_at`: when the machine is taken away, in seconds since the epoch; None: never."""
        self._source = source
        self._report = report
        self._head_id = head_id
        self._closing = Closing(ends_at)
        self._tasks: dict[str, Ensemble] = {}
        self._reported: dict[str, float] = {}
        #: the texts that somebody follows
        self.shown = ShownTexts()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    @property
    def num_coming(self) -> int:
        """Tasks that the source has for us."""
        return self._source.num_waiting

    @property
    def takes(self) -> bool:
        """False once too little time is left for any task."""
        return not self._closing.closed

    @property
    def has_closed(self) -> bool:
        """Whether too little time is left for any task, and none is here."""
        return self._closing.closed and not self._tasks and not self._source.num_waiting

    # -- tasks come -------------------------------------------------------------------------------------------

    def take(self) -> Iterator[Job]:
        """Take what has come: its jobs, in their order. What cannot become a job is told at once."""
        while (arrived := self._source.take()) is not None:
            if isinstance(arrived, Ensemble):
                self._tasks[arrived.task_id] = arrived
                yield from arrived.jobs
            else:
                self._report.finish(f"{arrived.job}.{arrived.attempt}", arrived)

    def all(self) -> list[str]:
        """Every task."""
        return list(self._tasks)

    def not_begun(self) -> list[str]:
        """The tasks without a job that has, or had, a slot."""
        return [task.task_id for task in self._tasks.values() if not task.has_begun]

    def too_late(self) -> list[str]:
        """The tasks that have not begun, once one of them could not be finished any more; else none."""
        waiting = [self._tasks[task_id] for task_id in self.not_begun()]
        if all(self._closing.admits(task.num_prompt, task.max_tokens) for task in waiting):
            return []
        log.info("too little time is left for %d of the jobs taken: handed back", len(waiting))
        return [task.task_id for task in waiting]

    # -- what is told of them ---------------------------------------------------------------------------------

    def began(self, job: Job) -> bool:
        """A job has got a slot for the first time; whether its task begins with it."""
        is_first = job is self._tasks[job.task_id].jobs[0]
        if is_first:
            self._report.started(job.task_id)
        return is_first

    def committed(self, job: Job) -> None:
        """A job's text has grown."""
        if self.shown.wants(job.task_id):
            self.shown.show(job.task_id, self._tasks[job.task_id].jobs.index(job), job.completion.text)

    def progressed(self, job: Job) -> None:
        """A job goes on; it is told now and then."""
        now = time.perf_counter()
        if now - self._reported.get(job.task_id, 0.0) >= PROGRESS_EVERY_S:
            self._reported[job.task_id] = now
            self._closing.measured(job.ledger.decode_tps())
            figures = self._tasks[job.task_id].figures()
            self._report.progress(job.task_id, figures.num_tokens, figures.decode_tps())

    def show_asked(self) -> None:
        """Show the texts that were asked for."""
        for task_id in self.shown.asked():
            if task_id in self._tasks:
                for number, job in enumerate(self._tasks[task_id].jobs):
                    self.shown.show(task_id, number, job.completion.text)

    # -- tasks leave ------------------------------------------------------------------------------------------

    def completed(self, job: Job) -> None:
        """A job's text is complete; its task ends with the last one."""
        self._closing.measured(job.ledger.decode_tps())
        if self._tasks[job.task_id].is_complete:
            self._report.finish(job.task_id, self._leave(job.task_id).completed(self._head_id))

    def stop(self, task_id: str, reason: StopReason) -> None:
        """A task ends with the text it has."""
        self._report.finish(task_id, self._leave(task_id).stopped(self._head_id, reason))

    def fail(self, task_id: str, failure: FailureType, message: str) -> None:
        """A task cannot go on."""
        self._report.finish(task_id, self._leave(task_id).failed(self._head_id, failure, message))

    def hand_back(self, task_id: str) -> None:
        """Give a task up, so that another head may take it."""
        self._leave(task_id)
        self._report.hand_back(task_id)

    def _leave(self, task_id: str) -> Ensemble:
        self._reported.pop(task_id, None)
        return self._tasks.pop(task_id)
