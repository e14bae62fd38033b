"""Settings of the head and tail processes; the only reader of their environment variables."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks import moments
from tasks.durations import DurationInvalid

#: most tokens a row may bring in one frame; sizes the padding of the tail's cache
MAX_QUERY = 512
#: most lanes of a link
MAX_LANES = 64
#: tokens of a prefill chunk, with a link and without one: 256 keep a GPU busy
SPLIT_CHUNK, WHOLE_CHUNK = 64, 256
#: tokens of prefill between two rounds. Of a whole model: rounds are worth the more, the more rows they have. On a link
#: the prompts' first tokens shall be on their way soon; a GPU computes several short ones in the time of one
WHOLE_PREFILL, GPU_PREFILL = 1024, 256

Quantization = Literal["none", "nf4", "int8"]
Split = Annotated[int, Field(ge=1)] | Literal["auto"]
Slots = Annotated[int, Field(ge=1)] | Literal["auto"]


def _moment(value: object) -> object:
    try:
        return moments.ahead(value, time.time()) if isinstance(value, str) else value
    except DurationInvalid as error:
        raise ValueError(f"--until (SHARDQ_UNTIL): {value!r}, expected {error}") from error


def _device(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", value):
        option = f"--{str(info.field_name).replace('_', '-')} (SHARDQ_{str(info.field_name).upper()})"
        raise ValueError(f"{option}: expected cpu, cuda or cuda:N, not {value!r}; other devices were not tried")
    return value


#: `cpu`, or a GPU that CUDA (or ROCm) knows
Device = Annotated[str, BeforeValidator(_device)]
#: written as a duration from now or a time of the day; seconds since the epoch
Moment = Annotated[float, BeforeValidator(_moment)]


class WorkerSettings(BaseSettings):
    """What both halves need to know. Each field is also the environment variable `SHARDQ_<FIELD>`."""

    # The addresses may hold passwords: they are kept out of reprs and error messages.
    model_config = SettingsConfigDict(
        env_prefix="SHARDQ_", frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True
    )

    #: Hugging Face directory, hub id or GGUF file of the target model
    model: str
    #: first layer of the tail's half; None cuts in the middle, "auto" asks both machines' memory and pace
    split: Split | None = None
    #: of weights and caches; both halves must agree
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    #: dtype of the hidden states between head and tail; None: that of `dtype`. Narrower ones change logits, so both
    #: halves must agree
    wire_dtype: Literal["float32", "float16", "bfloat16", "int8"] | None = None
    #: "dummy" takes random weights of the model's shapes instead of its own, for benchmarks: only config and tokenizer
    #: need be there. The drafter's model likewise
    load_format: Literal["auto", "dummy"] = "auto"
    #: of the linear layers' weights; both halves must agree
    quantization: Quantization = "none"
    #: where this half computes: `cpu`, `cuda`, `cuda:1`
    device: Device = "cpu"
    #: on a GPU, record computations once per shape and replay them, with fused kernels where the model allows
    graphs: bool = True
    #: a job's text does not depend on batch mates, draft lengths, lanes, prefix reuse or a prefill done again in half
    #: precision either; both halves must agree
    deterministic: bool = False
    #: the server that carries the frames between head and tail
    relay_url: str = Field(default="redis://127.0.0.1:6380/0", repr=False)
    #: longest prompt + completion, in tokens; both halves must agree
    max_length: int = Field(default=1024, ge=16)
    #: allow a Redis without password at an address other than this machine's own
    allow_insecure: bool = False

    @property
    def given_split(self) -> int | None:
        """The split as far as it is known; None is the middle."""
        return None if self.split == "auto" else self.split


class HeadSettings(WorkerSettings):
    """The head: engine, drafter and Celery fronts."""

    #: run the tail's half in this process, too: for a model that fits one machine. There is no link then, so
    #: `relay_url`, `wire_compress` and `tail_timeout_s` mean nothing, and `lanes = "auto"` no adapting
    whole: bool = False

    #: the name under which the model is served; None takes the last part of `model`
    name: str | None = None
    #: stable over restarts: it owns this head's unacknowledged messages
    head_id: str = Field(default_factory=socket.gethostname)
    broker_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    #: jobs decoded at the same time; "auto": as many as fit beside the weights
    slots: Slots = 16
    #: tokens drafted per row and round; 0 decodes plainly, "auto" asks measured acceptance and costs, row by row
    draft_length: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = "auto"
    #: the longest draft that "auto" considers
    max_draft_length: int = Field(default=16, ge=1, le=64)
    #: what guesses the next tokens; it changes when a text arrives, never the text
    drafter: Literal["none", "ngram", "suffix", "model", "hybrid"] = "ngram"
    #: the drafter's model for `drafter = "model"` and "hybrid"
    drafter_model: str | None = None
    #: where the drafter's model runs; None: on `device`. Elsewhere it drafts for one lane while the head's half
    #: computes another one's round
    drafter_device: Device | None = None
    #: of the drafter's weights and cache; None: `dtype`. It changes drafts, never texts
    drafter_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    #: of the drafter's own linear layers
    drafter_quantization: Quantization = "none"
    #: rounds in flight at the same time; "auto" asks measured times
    lanes: Annotated[int, Field(ge=1, le=MAX_LANES)] | Literal["auto"] = "auto"
    #: most lanes that "auto" uses
    max_lanes: int = Field(default=8, ge=1, le=MAX_LANES)
    #: tokens per prefill chunk, fewer where the link is slow; None takes 64, or 256 where there is no link
    prefill_chunk: int | None = Field(default=None, ge=1, le=MAX_QUERY)
    #: copy what a job's prompt has in common with a recent one's instead of computing it again
    prefix_reuse: bool = True
    #: deflate what can be deflated of hidden states, without loss, where the link is slower than that takes
    wire_compress: bool = False
    #: Celery consumer processes
    fronts: int = Field(default=8, ge=1)
    #: seconds after which a head that found no fitting tail gives up at its start; None waits for ever
    tail_timeout_s: float | None = Field(default=None, gt=0)
    #: seconds that running jobs get to finish after SIGTERM before they go back to the queue
    grace_s: float = Field(default=10.0, ge=0)
    #: when this process shall have ended by itself, as `11h30m` from its start or at `06:30`: it takes no job that it
    #: could not finish before
    until: Moment | None = None
    #: file for a timeline of draft, head, link and tail of every round (Chrome trace format); None writes none
    trace: str | None = None

    @property
    def stops_at(self) -> float | None:
        """When what still runs gets its last `grace_s` seconds; in seconds since the epoch."""
        return None if self.until is None else self.until - self.grace_s

    @property
    def num_slots(self) -> int:
        """The number of slots. Raises ValueError as long as "auto" was not replaced by what it comes to."""
        return int(self.slots)

    @property
    def max_query(self) -> int:
        """Most tokens a row of this head's frames brings."""
        return max(self.chunk_tokens, self.longest_draft + 1)

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a prefill chunk."""
        return self.prefill_chunk or (WHOLE_CHUNK if self.whole else SPLIT_CHUNK)

    @property
    def prefill_per_turn(self) -> int:
        """Tokens of prefill after which it is the rounds' turn again; at least one chunk goes."""
        if self.whole:
            return WHOLE_PREFILL
        return GPU_PREFILL if is_gpu(self.device) else 1

    @property
    def draft_device(self) -> str:
        """Where the drafter's model runs."""
        return self.drafter_device or self.device

    @property
    def draft_graphs(self) -> bool:
        """Whether the drafter's loop is recorded."""
        return self.graphs and is_gpu(self.draft_device)

    @property
    def drafts_apart_on(self) -> str | None:
        """The drafter's device, if drafting there can overlap with the head's half."""
        has_model = self.drafter in ("model", "hybrid")
        return self.draft_device if has_model and _index(self.draft_device) != _index(self.device) else None

    @property
    def longest_draft(self) -> int:
        """Most tokens drafted for a row."""
        return self.max_draft_length if self.draft_length == "auto" else self.draft_length

    @property
    def link_lanes(self) -> int:
        """Lanes that the link to the tail has: the handshake fixes them."""
        if self.lanes != "auto":
            return self.lanes
        if self.whole:  # nothing to hide but the drafter's time, where it works beside us
            return 1 if self.drafts_apart_on is None else 2
        return self.max_lanes

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        return self.name or PurePath(self.model.partition("@")[0]).stem


class TailSettings(WorkerSettings):
    """The tail: second half, LM head, sampling and verification."""

    #: what the tail is called in lists and logs
    tail_name: str = Field(default_factory=socket.gethostname)
    #: most slots a head may ask for; "auto": as many as fit beside the weights
    slots: Slots = 64


class CacheSettings(BaseSettings):
    """Where converted models are kept."""

    model_config = SettingsConfigDict(
        env_prefix="SHARDQ_", frozen=True, extra="ignore", populate_by_name=True, env_ignore_empty=True
    )

    #: where converted models are kept; None takes `shardq` in the user's cache directory
    cache_dir: Path | None = None
    #: the user's cache directory, from XDG_CACHE_HOME
    xdg_cache_home: Path | None = Field(default=None, validation_alias=AliasChoices("XDG_CACHE_HOME"))

    @property
    def directory(self) -> Path:
        """The directory itself, which need not exist yet."""
        return self.cache_dir or (self.xdg_cache_home or Path.home() / ".cache") / "shardq"


def _index(device: str) -> str:
    """The device's name with its number: `cuda` alone means the first one."""
    return device if ":" in device or device == "cpu" else f"{device}:0"


def is_gpu(device: str) -> bool:
    """Whether the device's name is that of a GPU."""
    return device.partition(":")[0] == "cuda"
