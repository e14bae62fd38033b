"""From a task to a job: chat template, tokens, limits."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from relay.fields import MAX_ALTERNATIVES, MAX_BARRED, MAX_BIASES, MAX_HISTORY
from relay.messages import Sampling
from tasks.generation import LONG_CHARACTERS, FailureType, GenerationRequest, GenerationTask
from workers.head.completion import Completion
from workers.head.ensemble import Ensemble
from workers.head.fewest import FewestTokens
from workers.head.jobs import Job
from workers.head.likelihoods import Likelihoods
from workers.head.plaincontents import PlainContents
from workers.head.spelling import Spelling


class PromptRejected(Exception):
    """The prompt cannot be served; ends the job with a typed failure."""

    def __init__(self, failure: FailureType, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Encoder:
    """Tokens of texts, as a transformers tokenizer makes them. Thread-safe.

    Some tokenizers change themselves while they work (CodeLlama's does for `<FILL_ME>`), so one thread at a time has
    each. Long texts have a copy of their own, made when one comes: no other text waits for them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._copy: Any = None
        self._copy_lock = threading.Lock()

    def __call__(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_CHARACTERS:
            with self._lock:
                return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        with self._copy_lock:
            if self._copy is None:
                with self._lock:
                    self._copy = copy.deepcopy(self._tokenizer)
            return list(self._copy(text, add_special_tokens=add_special_tokens)["input_ids"])


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns tasks into jobs. Thread-safe."""

    #: a transformers tokenizer
    tokenizer: Any
    eos: tuple[int, ...]
    vocab_size: int
    #: longest prompt + completion, in tokens
    context: int
    _spelling: Spelling = field(init=False)
    _encoder: Encoder = field(init=False)
    _fewest: FewestTokens = field(init=False)
    #: the texts of special tokens, by their ids
    _special: dict[int, str] = field(init=False)
    _plain: PlainContents = field(init=False)

    def __post_init__(self) -> None:
        backend = self.tokenizer.backend_tokenizer
        object.__setattr__(self, "_spelling", Spelling(backend))
        object.__setattr__(self, "_encoder", Encoder(self.tokenizer))
        object.__setattr__(self, "_fewest", FewestTokens(backend))
        object.__setattr__(self, "_plain", PlainContents(backend, str(self.tokenizer.chat_template)))
        added = backend.get_added_tokens_decoder().items()
        object.__setattr__(self, "_special", {token: each.content for token, each in added if each.special})

    def read(self, task: GenerationTask) -> Job:
        """The job of a task's first choice. Raises PromptRejected."""
        return self._job(task, self._prompt(task.request), choice=0)

    def read_all(self, task: GenerationTask) -> Ensemble:
        """The jobs of all of a task's choices. Raises PromptRejected."""
        prompt = self._prompt(task.request)
        return Ensemble(tuple(self._job(task, prompt, choice) for choice in range(task.request.n)))

    def _prompt(self, request: GenerationRequest) -> list[int]:
        prompt = self._tokens(request)
        self._check(prompt)
        return prompt

    def _job(self, task: GenerationTask, prompt: list[int], choice: int) -> Job:
        request = task.request.of_choice(choice)
        max_tokens = min(request.max_tokens, self.context - len(prompt))
        sampling = self._sampling(request, len(prompt))
        self._check_sampling(sampling, request, max(len(set(prompt)), max_tokens))
        return Job(
            task=task,
            sampling=sampling,
            completion=Completion(
                self.tokenizer.backend_tokenizer,
                max_tokens=max_tokens,
                stop=request.stop,
                ignore_eos=request.ignore_eos,
                eos_ids=self.eos,
                stop_ids=request.stop_token_ids,
                min_tokens=request.min_tokens,
                special=self._special,
            ),
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_tokens=max_tokens,
            likelihoods=None if request.logprobs is None else Likelihoods(self._spelling),
        )

    def _sampling(self, request: GenerationRequest, num_prompt: int) -> Sampling:
        """The request's sampling: what would end the text is barred while it has less than `min_tokens`."""
        eos = () if request.ignore_eos else tuple(token for token in self.eos if token < self.vocab_size)
        ending = (*eos, *request.stop_token_ids)
        has_minimum = request.min_tokens > 0 and bool(ending)
        return Sampling(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=request.seed,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=tuple((each.token, each.bias) for each in request.logit_bias),
            barred=tuple(sorted(set(ending))) if has_minimum else (),
            free_from=min(num_prompt + request.min_tokens, self.context) if has_minimum else 0,
            logprobs=request.logprobs,
        )

    def _check_sampling(self, sampling: Sampling, request: GenerationRequest, num_counted: int) -> None:
        """Refuse what the model, or a frame, has no room for; a penalty counts up to `num_counted` tokens."""
        told = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": request.stop_token_ids}
        for name, tokens in told.items():
            unknown = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
            if unknown is not None:
                raise PromptRejected(
                    FailureType.INVALID_PROMPT,
                    f"{name}: token id {unknown} is not in 0..{self.vocab_size - 1}, the model's vocabulary of "
                    f"{self.vocab_size}",
                )
        limits = (
            ("logit_bias", len(sampling.logit_bias), MAX_BIASES),
            ("stop_token_ids", len(sampling.barred), MAX_BARRED),
            ("logprobs", sampling.logprobs or 0, MAX_ALTERNATIVES),
            ("tokens that penalties count", num_counted if sampling.has_penalties else 0, MAX_HISTORY),
        )
        for name, number, most in limits:
            if number > most:
                raise PromptRejected(FailureType.INVALID_PROMPT, f"{name}: expected at most {most}, got {number}")

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise PromptRejected(FailureType.INVALID_PROMPT, "the prompt has no tokens; expected at least one")
        if len(prompt) >= self.context:
            raise self._too_long(f"{len(prompt)} tokens")
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise PromptRejected(FailureType.INVALID_PROMPT, f"token id {token} is not in 0..{self.vocab_size - 1}")

    def _tokens(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, tuple):
            return list(request.prompt)
        if request.prompt is not None:
            return self._encoded(request.prompt, add_special_tokens=True)
        return self._chat_tokens([dict(message) for message in request.messages or ()], request.sanitize_control_tokens)

    def _chat_tokens(self, messages: list[dict[str, Any]], sanitize: bool) -> list[int]:
        if not self.tokenizer.chat_template:
            raise PromptRejected(
                FailureType.INVALID_PROMPT,
                "the model has no chat template; send `prompt` instead of `messages`",
            )
        # The template writes the special tokens itself: no second BOS.
        if not sanitize:
            return self._encoded(self._rendered(messages), add_special_tokens=False)
        rendered = self._rendered([self._plain.mark(message) for message in messages])
        self._check_length(self._plain.without_marks(rendered))
        return self._plain.tokens(rendered)

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is code of the model's: it may raise anything
            raise PromptRejected(FailureType.INVALID_PROMPT, _template_failure(error)) from error

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._check_length(text)
        return self._encoder(text, add_special_tokens)

    def _check_length(self, text: str) -> None:
        fewest = self._fewest(text)
        if fewest >= self.context:
            raise self._too_long(f"at least {fewest} tokens")

    def _too_long(self, length: str) -> PromptRejected:
        return PromptRejected(
            FailureType.CONTEXT_LENGTH,
            f"the prompt has {length}, the served context is {self.context} (prompt and at least one completion token)",
        )


def _template_failure(error: Exception) -> str:
    told = " ".join(str(error).split())
    if type(error) is TemplateError:  # what a template raises by itself, with `raise_exception`
        return f"the chat template refuses the messages: {told}"
    return f"the chat template failed: {type(error).__name__}: {told}"
