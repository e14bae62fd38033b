"""The completions of one task: a job each, with a slot each, and one outcome together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.generation import Choice, FailureType, FinishReason, Outcome, StopReason
from workers.head.jobs import Job
from workers.head.ledger import Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble:
    """The jobs of a task's choices, in their order. They share its id, stand in line together and end together.

    A choice that is complete gives its slot away at once. Whatever else ends one, ends all of them.
    """

    jobs: tuple[Job, ...]

    @property
    def task_id(self) -> str:
        """The Celery task id of the attempt."""
        return self.jobs[0].task_id

    @property
    def has_begun(self) -> bool:
        """Whether a choice has, or had, a slot."""
        return self.jobs[0].ledger.has_started

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.jobs[0].num_prompt

    @property
    def max_tokens(self) -> int:
        """Most tokens that the longest choice may get."""
        return max(job.max_tokens for job in self.jobs)

    @property
    def is_complete(self) -> bool:
        """Whether every text is."""
        return all(job.completion.finish_reason is not None for job in self.jobs)

    def completed(self, head: str) -> Outcome:
        """The outcome of a complete task."""
        first, *others = (job.completed(head, _reason(job)) for job in self.jobs)
        choices = (Choice(o.text or "", o.token_ids, o.finish_reason or FinishReason.STOP, o.logprobs) for o in others)
        return replace(self._measured(first), choices=tuple(choices))

    def failed(self, head: str, failure: FailureType, message: str) -> Outcome:
        """The outcome of a task that cannot go on; the first choice's text so far is kept."""
        return self._measured(self.jobs[0].failed(head, failure, message))

    def stopped(self, head: str, reason: StopReason) -> Outcome:
        """The outcome of a task that shall end here; the first choice's text so far is kept."""
        if not self.has_begun:
            return self.jobs[0].never_begun(head, reason)
        return self._measured(self.jobs[0].stopped(head, reason))

    def figures(self) -> Ledger:
        """Of all choices that have, or had, a slot; the first one begins first."""
        return Ledger.together([job.ledger for job in self.jobs if job.ledger.has_started])

    def _measured(self, outcome: Outcome) -> Outcome:
        return replace(outcome, metrics=self.figures().metrics())


def _reason(job: Job) -> FinishReason:
    reason = job.completion.finish_reason
    assert reason is not None, "a complete task has complete texts"
    return reason
