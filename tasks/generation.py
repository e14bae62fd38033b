"""A job as it travels from the database to an engine, and the outcome as it travels back. Plain JSON both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from relay.plain import from_plain

# said again, for the packages that may not import `storage`
from storage.states import StopReason as StopReason
from tasks.logprobs import Alternative as Alternative
from tasks.logprobs import TokenLogprob as TokenLogprob
from tasks.logprobs import pack, unpack
from tasks.seeds import choice_seed

#: `max_tokens` of a job that does not say
DEFAULT_MAX_TOKENS = 512
#: characters from which on a text is long: tokenising it takes a noticeable time, and memory
LONG_CHARACTERS = 256 * 1024


@dataclass(frozen=True, slots=True)
class TokenBias:
    """What is added to one token's logit."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. Exactly one of `prompt` and `messages` is set (checked at submission)."""

    #: text, or token ids used as they are
    prompt: str | tuple[int, ...] | None
    #: chat messages `{"role": …, "content": …}` for the model's chat template
    messages: tuple[dict[str, Any], ...] | None
    #: always stored: drawn at submission where the user gave none
    seed: int
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    #: 0 = off
    top_k: int = 0
    #: 1.0 = off
    top_p: float = 1.0
    #: 0.0 = off
    min_p: float = 0.0
    #: the text ends before the first of these
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    #: completions wanted; completion i draws its tokens with `tasks.seeds.choice_seed(seed, i)`, the first with `seed`
    n: int = 1
    #: 1.0 = off
    repetition_penalty: float = 1.0
    #: 0.0 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()
    #: no end-of-sequence token, stop token or stop string ends the text before it has so many tokens
    min_tokens: int = 0
    #: tokens that end the text as an end-of-sequence token does
    stop_token_ids: tuple[int, ...] = ()
    #: likeliest tokens wanted at each position with their log probabilities; None wants no log probabilities
    logprobs: int | None = None
    #: in a chat: what reads like a control token in a message becomes ordinary tokens
    sanitize_control_tokens: bool = False

    @property
    def version(self) -> int:
        """The lowest version of the tasks that can carry this request."""
        return max((since for name, since in SINCE.items() if getattr(self, name) != _NEUTRAL[name]), default=1)

    @property
    def is_long(self) -> bool:
        """Whether its prompt, or its messages together, are a long text."""
        texts = [self.prompt, *(message.get("content") for message in self.messages or ())]
        return sum(len(text) for text in texts if isinstance(text, str)) >= LONG_CHARACTERS

    def of_choice(self, choice: int) -> GenerationRequest:
        """The request for completion `choice` (from 0) alone."""
        return replace(self, n=1, seed=choice_seed(self.seed, choice))

    def to_json(self) -> dict[str, Any]:
        """This request as plain JSON values, without the younger parameters that ask for nothing.

        So a request that uses none of them is written as before there were any: stored results keep their keys.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        silent = [name for name, neutral in _NEUTRAL.items() if values[name] == neutral]
        return plain_fields({name: value for name, value in values.items() if name not in silent})

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GenerationRequest:
        """The request that `to_json` wrote, also after a trip through JSON. Raises ValueError for anything else."""
        return from_plain(cls, value)


#: parameters that a head may be too old to read, and the version of the tasks that brought them. A new one gets the
#: next version, and a default that asks for nothing: a task without it stays one of an earlier version
SINCE: dict[str, int] = {"sanitize_control_tokens": 2}
#: parameters that are not written where they ask for nothing
_YOUNGER = (
    *("n", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "stop_token_ids", "logprobs"),
    *SINCE,
)
_NEUTRAL = {field.name: field.default for field in fields(GenerationRequest) if field.name in _YOUNGER}


def known_versions() -> range:
    """The versions of the tasks that this shardq reads and writes; whoever reads one reads all before it."""
    return range(1, max(SINCE.values(), default=1) + 1)


def plain_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `GenerationRequest` as plain JSON values, not copied as far as they are plain already."""
    plain = dict(values)
    if "logit_bias" in plain:
        plain["logit_bias"] = [asdict(item) for item in plain["logit_bias"]]
    return plain


# What is no such id must not become one: the database's numbers end somewhere.
_TASK_ID = re.compile(r"(.+)\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Attempt:
    """The name of one attempt at one job."""

    job: str
    attempt: int

    @property
    def task_id(self) -> str:
        """Its Celery task id."""
        return f"{self.job}.{self.attempt}"

    @classmethod
    def of(cls, task_id: str) -> Attempt | None:
        """The attempt with this task id; None for the id of something else."""
        found = _TASK_ID.fullmatch(task_id)
        return cls(found[1], int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One attempt at one job: the arguments of the Celery task `shardq.generate`."""

    job: str
    attempt: int
    batch: str
    custom_id: str
    model: str
    request: GenerationRequest

    @property
    def task_id(self) -> str:
        """The Celery task id: the same for every delivery of one attempt."""
        return f"{self.job}.{self.attempt}"

    def to_json(self) -> dict[str, Any]:
        """This task as plain JSON values."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "request": self.request.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GenerationTask:
        """The task that `to_json` wrote. Raises ValueError for anything else."""
        return from_plain(cls, value)


class FinishReason(StrEnum):
    """Why a completed job's text ended."""

    #: an end-of-sequence token or a stop string
    STOP = "stop"
    #: `max_tokens` or the context
    LENGTH = "length"


class FailureType(StrEnum):
    """Why a job failed."""

    #: prompt longer than the served context
    CONTEXT_LENGTH = "context_length_exceeded"
    #: the prompt is no valid input for this model (token out of range, chat template refuses it)
    INVALID_PROMPT = "invalid_prompt"
    #: the model produced NaN or infinite logits
    NON_FINITE = "non_finite_logits"
    #: a device had no memory for this job
    OUT_OF_MEMORY = "out_of_memory"
    #: the job was under way on several engines that died or lost it; it is not tried again
    TOO_MANY_TRIES = "too_many_tries"
    #: the texts are complete, but together too large to travel
    OUTCOME_TOO_LARGE = "outcome_too_large"
    #: a fault of the engine while it worked on this job
    INTERNAL = "internal_error"


#: the request is the cause: on heads and tails started as they are the same job fails again
REQUEST_FAILURES = frozenset({FailureType.CONTEXT_LENGTH, FailureType.INVALID_PROMPT, FailureType.OUTCOME_TOO_LARGE})


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one generation (`docs/glossary.md` defines them). Times in seconds, clock: the head's."""

    #: Unix time at which the job got its slot, and at which its last token was committed
    started_at: float
    finished_at: float
    #: from `started_at` to the first committed token
    ttft_s: float | None
    #: tokens after the first commit / (last commit - first commit); None without an interval
    decode_tps: float | None
    #: speculative rounds, prefill's token excluded
    rounds: int
    #: tokens committed per round; None without a round
    tokens_per_round: float | None
    drafted: int
    accepted: int
    cached_tokens: int
    wire_bytes_up: int
    wire_bytes_down: int
    draft_s: float
    head_s: float
    link_s: float
    tail_s: float
    #: of the hidden states between head and tail: it changes logits; None from a head that does not say
    wire_dtype: str | None = None
    #: entry k: of the rounds that drafted k tokens, k + 1 counts by how many of them were accepted; the last is never
    #: all zeros. Empty from a head that does not say
    rounds_by_draft: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One more completion of a job that asked for several."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """This choice as plain JSON values."""
        return {**asdict(replace(self, logprobs=())), "logprobs": pack(self.logprobs)}

    @classmethod
    def from_json(cls, value: object) -> Choice:
        """The choice that `to_json` wrote. Raises ValueError for anything else."""
        return replace(from_plain(cls, _without(value, "logprobs")), logprobs=unpack(_get(value, "logprobs")))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt: a text with figures, a failure, or a stop. Travels on the results stream."""

    job: str
    attempt: int
    head: str
    text: str | None
    #: completion tokens as committed, the end-of-sequence token included
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    #: both None for a completed job
    failure: FailureType | None
    failure_message: str | None
    metrics: Metrics | None
    #: the database wanted the job to end here; `text` is what there was by then, None for none
    stopped: StopReason | None = None
    #: one for each of `token_ids`, if the request asked for them
    logprobs: tuple[TokenLogprob, ...] = ()
    #: completions 2 to n of a request for several; `text`, `token_ids` and `finish_reason` are the first one's
    choices: tuple[Choice, ...] = ()

    @classmethod
    def unbegun(
        cls,
        task: GenerationTask | Attempt,
        head: str,
        *,
        failure: FailureType | None = None,
        message: str | None = None,
        stopped: StopReason | None = None,
    ) -> Outcome:
        """The outcome of a job that no model worked on: it failed, or was stopped, before that."""
        return cls(
            job=task.job,
            attempt=task.attempt,
            head=head,
            text=None,
            token_ids=(),
            finish_reason=None,
            prompt_tokens=0,
            failure=failure,
            failure_message=message,
            metrics=None,
            stopped=stopped,
        )

    def without_texts(self, reason: str) -> Outcome:
        """This end without texts, which are too large to travel, as `reason` says: a completed job has failed then."""
        bare = replace(self, text=None, token_ids=(), finish_reason=None, logprobs=(), choices=())
        if self.failure is not None or self.stopped is not None:
            return bare
        return replace(bare, failure=FailureType.OUTCOME_TOO_LARGE, failure_message=reason)

    @property
    def task_id(self) -> str:
        """The Celery task id of the attempt."""
        return f"{self.job}.{self.attempt}"

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all choices."""
        return len(self.token_ids) + sum(len(choice.token_ids) for choice in self.choices)

    def to_json(self) -> dict[str, Any]:
        """This outcome as plain JSON values."""
        plain = asdict(replace(self, logprobs=(), choices=()))
        return {**plain, "logprobs": pack(self.logprobs), "choices": [choice.to_json() for choice in self.choices]}

    @classmethod
    def from_json(cls, value: object) -> Outcome:
        """The outcome that `to_json` wrote. Raises ValueError for anything else."""
        choices = _get(value, "choices")
        choices = [] if choices is None else choices
        if not isinstance(choices, list | tuple):
            raise ValueError(f"Outcome.choices: expected a list, got {type(choices).__name__}")
        return replace(
            from_plain(cls, _without(value, "logprobs", "choices")),
            logprobs=unpack(_get(value, "logprobs")),
            choices=tuple(Choice.from_json(choice) for choice in choices),
        )


def _get(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _without(value: object, *names: str) -> object:
    return {key: item for key, item in value.items() if key not in names} if isinstance(value, dict) else value
