"""From a task to a job: chat template, tokens, limits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from relay.messages import Sampling
from tasks.generation import FailureType, GenerationRequest, GenerationTask
from workers.head.completion import Completion
from workers.head.ensemble import Ensemble
from workers.head.jobs import Job


class PromptRejected(Exception):
    """The prompt cannot be served; ends the job with a typed failure."""

    def __init__(self, failure: FailureType, message: str) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns tasks into jobs. Thread-safe."""

    #: a transformers tokenizer
    tokenizer: Any
    eos: tuple[int, ...]
    vocab_size: int
    #: longest prompt + completion, in tokens
    context: int
    # a fast tokenizer refuses to be used by two threads at once
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, task: GenerationTask) -> Job:
        """The job of a task's first choice. Raises PromptRejected."""
        return self._job(task, self._prompt(task.request), choice=0)

    def read_all(self, task: GenerationTask) -> Ensemble:
        """The jobs of all of a task's choices. Raises PromptRejected."""
        prompt = self._prompt(task.request)
        return Ensemble(tuple(self._job(task, prompt, choice) for choice in range(task.request.n)))

    def _prompt(self, request: GenerationRequest) -> list[int]:
        with self._lock:
            prompt = self._tokens(request)
        self._check(prompt)
        return prompt

    def _job(self, task: GenerationTask, prompt: list[int], choice: int) -> Job:
        request = task.request.of_choice(choice)
        max_tokens = min(request.max_tokens, self.context - len(prompt))
        return Job(
            task=task,
            sampling=Sampling(request.temperature, request.top_k, request.top_p, request.min_p, request.seed),
            completion=Completion(
                self.tokenizer.backend_tokenizer,
                max_tokens=max_tokens,
                stop=request.stop,
                ignore_eos=request.ignore_eos,
                eos_ids=self.eos,
            ),
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_tokens=max_tokens,
        )

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise PromptRejected(FailureType.INVALID_PROMPT, "the prompt has no tokens; expected at least one")
        if len(prompt) >= self.context:
            raise PromptRejected(
                FailureType.CONTEXT_LENGTH,
                f"the prompt has {len(prompt)} tokens, the served context is {self.context} "
                f"(prompt and at least one completion token)",
            )
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise PromptRejected(FailureType.INVALID_PROMPT, f"token id {token} is not in 0..{self.vocab_size - 1}")

    def _tokens(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, tuple):
            return list(request.prompt)
        if request.prompt is not None:
            return list(self.tokenizer(request.prompt)["input_ids"])
        return self._chat_tokens([dict(message) for message in request.messages or ()])

    def _chat_tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise PromptRejected(
                FailureType.INVALID_PROMPT,
                "the model has no chat template; send `prompt` instead of `messages`",
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise PromptRejected(
                FailureType.INVALID_PROMPT, f"the chat template refuses the messages: {error}"
            ) from error
        # The template writes the special tokens itself: no second BOS.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
