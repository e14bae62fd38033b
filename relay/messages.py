"""The frames of the relay: one frozen dataclass per kind.

Upward frames go from head to tail (`Hello`, `Prefill`, `Round`, `Release`), downward frames from tail to head
(`Welcome`, `Verdict`, `Error`). `docs/protocol.md` is the state machine these frames drive.

A *row* of work is identified by (epoch, slot, generation, round, position, token): the epoch is in the stream's
key, the rest in the row. `round` counts the frames of one generation of one slot, prefill chunks included, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relay.profile import Profile
from relay.tail_figures import TailFigures

#: of the frames' format: both sides of a link speak the same one
FRAME_VERSION = 4
#: that of heads and tails that do not tell theirs: at this one they began to
FIRST_TOLD_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix of hidden states: raw bytes, C-contiguous and little-endian, with what is needed to read them."""

    #: one of `DTYPE_BYTES`
    dtype: str
    #: [tokens, hidden]
    shape: tuple[int, ...]
    data: bytes | memoryview
    #: of "int8": one float32 a token, times which the token's elements are its values; a token whose values were not
    #: finite has a NaN there. Empty for every other dtype
    scales: bytes | memoryview = b""


#: bytes per element of every dtype a frame may carry
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
#: bytes of the scale of a token in "int8"
SCALE_BYTES = 4


def token_bytes(hidden_size: int, dtype: str) -> int:
    """What a token's hidden state takes on the wire."""
    return hidden_size * DTYPE_BYTES[dtype] + (SCALE_BYTES if dtype == "int8" else 0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are chosen; `temperature` 0 is greedy and ignores the rest."""

    temperature: float
    #: 0 switches the filter off
    top_k: int
    #: 1.0 switches the filter off
    top_p: float
    #: 0.0 switches the filter off
    min_p: float
    #: signed 64 bit
    seed: int
    #: logits of tokens that the prompt or the output holds are divided by it, or multiplied where negative; 1.0 is off
    repetition_penalty: float = 1.0
    #: taken from the logits of tokens that the output holds
    presence_penalty: float = 0.0
    #: taken from the logit of a token once for each time the output holds it
    frequency_penalty: float = 0.0
    #: (token id, what is added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: token ids that may not be chosen at absolute positions below `free_from`
    barred: tuple[int, ...] = ()
    free_from: int = 0
    #: likeliest tokens wanted with their log probabilities, beside the chosen one's; None wants none at all
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_processors(self) -> bool:
        """Whether logits are anything but the model's own before they are chosen from."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.barred)

    @property
    def without_processors(self) -> Sampling:
        """The rest of it, which is small."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


@dataclass(frozen=True, slots=True)
class History:
    """A job's tokens so far, for samplings whose penalties count them."""

    #: the prompt's tokens, each once, in any order; none without a repetition penalty: nothing else looks at them
    prompt: tuple[int, ...]
    #: committed tokens
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position, of the model's own logits before any processor; float32, 0 at most."""

    #: of the committed token
    chosen: float
    #: the likeliest tokens, best first, and theirs
    top: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """The head opens an epoch on a tail it has leased."""

    head: str
    epoch: int
    lanes: int
    profile: Profile
    #: first layer of the tail's half
    split: int
    slots: int
    #: most tokens a row of a `Round` or a `Prefill` chunk may bring
    max_query: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The tail accepts the epoch; every cache slot is empty."""

    tail: str
    epoch: int


class ErrorReason(StrEnum):
    """Why a tail refuses an epoch or gives one up."""

    PROFILE_MISMATCH = "profile_mismatch"
    SPLIT_MISMATCH = "split_mismatch"
    TOO_MANY_SLOTS = "too_many_slots"
    QUERY_TOO_LONG = "query_too_long"
    TAIL_FAILED = "tail_failed"


@dataclass(frozen=True, slots=True)
class Error:
    """The tail refuses or ends the epoch; `message` names both sides of a mismatch."""

    epoch: int
    reason: ErrorReason
    message: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Start a slot with the first `length` cache positions of another slot instead of computing them."""

    slot: int
    generation: int
    length: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk of known tokens of one slot. Round 0 starts a new generation of the slot."""

    #: the head's number for this frame; a resent frame keeps it, the answer repeats it
    number: int
    slot: int
    generation: int
    round: int
    #: absolute position of the chunk's first token
    position: int
    #: the chunk's last token: the base token if this is the last chunk
    token: int
    #: whether the last row is to be sampled (it gives the first token)
    last: bool
    #: of a chunk that is not the last, `without_processors`
    sampling: Sampling
    copy: Copy | None
    #: [tokens, hidden]
    hidden: Tensor
    #: with a last chunk, if the sampling has penalties
    history: History | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """One row of a round: the base token, not yet in any cache, and what the drafter puts after it."""

    slot: int
    generation: int
    round: int
    #: absolute position of the base token
    position: int
    #: the base token: the last committed one
    token: int
    draft: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One speculative round of a lane."""

    number: int
    rows: tuple[Draft, ...]
    #: packed [sum(1 + len(row.draft)), hidden], rows in order
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Release:
    """A slot's generation is over; the tail forgets it."""

    number: int
    slot: int
    generation: int
    round: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """A row's verdict: `accepted` drafted tokens held, `tokens` = those and the tail's own next one.

    For a prefill chunk that is not the last, and for a release, `tokens` is empty.
    """

    slot: int
    generation: int
    round: int
    accepted: int
    tokens: tuple[int, ...]
    #: one for each of `tokens`, if the sampling asks for them
    logprobs: tuple[TokenLogprobs, ...] = ()


class VoidReason(StrEnum):
    """Why a row was not applied."""

    #: the slot holds another generation
    GENERATION = "generation"
    #: the row's round is neither the next nor a remembered one
    ROUND = "round"
    #: base position or base token differ from the tail's state
    BASE = "base"
    #: the prefix to copy is no longer there
    COPY = "copy"
    #: the logits were not finite: the job cannot go on
    NON_FINITE = "non_finite"
    #: the row does not fit the slot or the vocabulary
    BOUNDS = "bounds"
    #: the tail had no memory for the frame
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class Void:
    """A row that was not applied: the tail's state is as before it."""

    slot: int
    generation: int
    round: int
    reason: VoidReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the upward frame `number`, row by row in its order."""

    number: int
    rows: tuple[Accepted | Void, ...]
    #: seconds the tail worked on the frame, its share where several ran as one; 0 for a stored answer
    tail_s: float
    #: seconds the frame lay at the tail besides
    waited_s: float = 0.0
    #: with one verdict every few seconds
    figures: TailFigures | None = None


Upward = Hello | Prefill | Round | Release
Downward = Welcome | Verdict | Error
Message = Upward | Downward
