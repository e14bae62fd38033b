"""A job while an engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from relay.messages import History, Sampling, TokenLogprobs
from tasks.generation import FailureType, FinishReason, GenerationTask, Outcome, StopReason
from workers.head.completion import Completion
from workers.head.ledger import Ledger
from workers.head.likelihoods import Likelihoods


@dataclass(slots=True, eq=False)
class Job:
    """One choice of one attempt at one job, from its tokenised prompt to its outcome."""

    task: GenerationTask
    sampling: Sampling
    completion: Completion
    #: prompt and committed tokens; the last one is the base token of the next round
    tokens: list[int]
    num_prompt: int
    #: prompt + completion never exceed this
    max_tokens: int
    ledger: Ledger = field(default_factory=Ledger)
    #: prefills begun again since the last commit
    restarts: int = 0
    #: the job has had a slot
    begun: bool = False
    #: times there was no memory for the job although it ran alone, since the last commit
    shortages: int = 0
    #: engines died over this job: it runs alone, so that it takes no other one with it
    suspect: bool = False
    #: None where the request asks for none
    likelihoods: Likelihoods | None = None

    @property
    def task_id(self) -> str:
        """The Celery task id of this attempt."""
        return self.task.task_id

    @property
    def num_remaining(self) -> int:
        """Tokens the job may still commit."""
        return self.max_tokens - (len(self.tokens) - self.num_prompt)

    @property
    def history(self) -> History | None:
        """What a tail must know of the tokens so far beside their hidden states: None without penalties."""
        if not self.sampling.has_penalties:
            return None
        num_told = self.num_prompt if self.sampling.repetition_penalty != 1.0 else 0
        return History(tuple(set(self.tokens[:num_told])), tuple(self.tokens[self.num_prompt :]))

    def commit(
        self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> tuple[int, FinishReason | None]:
        """Append verified tokens up to the end of the text; returns how many were kept, and why it ended."""
        before = self.completion.num_tokens
        reason = self.completion.commit(tokens)
        kept = self.completion.num_tokens - before
        self.tokens.extend(tokens[:kept])
        if self.likelihoods is not None:
            self.likelihoods.extend(tokens[:kept], logprobs)
        self.restarts = self.shortages = 0
        self.ledger.commit(kept)
        return kept, reason

    def count_cached(self, num_tokens: int) -> None:
        """So many tokens were copied, not prefilled; what a job needs to go on again does not count."""
        if not self.ledger.num_tokens:
            self.ledger.cached_tokens = num_tokens

    def begin(self, wire_dtype: str) -> bool:
        """The job gets a slot, on a head that sends hidden states in `wire_dtype`; whether it is the first one."""
        if self.begun:
            return False
        self.begun = True
        self.ledger.start(wire_dtype)
        return True

    def completed(self, head: str, reason: FinishReason) -> Outcome:
        """The outcome of a job whose text is complete."""
        return self._ended(head, reason=reason)

    def failed(self, head: str, failure: FailureType, message: str) -> Outcome:
        """The outcome of a job that cannot go on; the text so far is kept."""
        return self._ended(head, failure=failure, message=message)

    def stopped(self, head: str, reason: StopReason) -> Outcome:
        """The outcome of a job that shall end here; the text so far is kept."""
        return self._ended(head, stopped=reason)

    def _ended(
        self,
        head: str,
        *,
        reason: FinishReason | None = None,
        failure: FailureType | None = None,
        message: str | None = None,
        stopped: StopReason | None = None,
    ) -> Outcome:
        return Outcome(
            job=self.task.job,
            attempt=self.task.attempt,
            head=head,
            text=self.completion.text,
            token_ids=self.completion.tokens,
            finish_reason=reason,
            prompt_tokens=self.num_prompt,
            failure=failure,
            failure_message=message,
            metrics=self.ledger.metrics(),
            stopped=stopped,
            logprobs=() if self.likelihoods is None else self.likelihoods.told,
        )

    def never_begun(self, head: str, reason: StopReason) -> Outcome:
        """The outcome of a job that shall end before it got a slot: without text and figures."""
        return replace(self.stopped(head, reason), text=None, metrics=None)
