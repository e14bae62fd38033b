"""A job as it travels from the database to an engine, and the outcome as it travels back. Plain JSON both ways."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from relay.plain import from_plain

# said again, for the packages that may not import `storage`
from storage.states import StopReason as StopReason

#: `max_tokens` of a job that does not say
DEFAULT_MAX_TOKENS = 512


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
    #: completions wanted; completion i draws its tokens with a seed derived from `seed` and i, the first with `seed`
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

    def to_json(self) -> dict[str, Any]:
        """This request as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GenerationRequest:
        """The request that `to_json` wrote, also after a trip through JSON. Raises ValueError for anything else."""
        return from_plain(cls, value)


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
        return asdict(self)

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
    #: a fault of the engine while it worked on this job
    INTERNAL = "internal_error"


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


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could stand at a position."""

    token: int
    #: decoded by itself, and its bytes: a token may hold a part of a character
    text: str
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probabilities at one position of a completion."""

    chosen: Alternative
    #: likeliest first
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One more completion of a job that asked for several."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


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

    @property
    def task_id(self) -> str:
        """The Celery task id of the attempt."""
        return f"{self.job}.{self.attempt}"

    def to_json(self) -> dict[str, Any]:
        """This outcome as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        """The outcome that `to_json` wrote. Raises ValueError for anything else."""
        return from_plain(cls, value)
