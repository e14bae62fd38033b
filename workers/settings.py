"""Settings of the head and tail processes; the only reader of their environment variables."""

from __future__ import annotations

import socket
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

#: most tokens a row may bring in one frame; sizes the padding of the tail's cache
MAX_QUERY = 512
#: most lanes of a link
MAX_LANES = 64

Quantization = Literal["none", "nf4", "int8"]
Split = Annotated[int, Field(ge=1)] | Literal["auto"]
Slots = Annotated[int, Field(ge=1)] | Literal["auto"]


class WorkerSettings(BaseSettings):
    """What both halves need to know. Each field is also the environment variable `SHARDQ_<FIELD>`."""

    # The addresses may hold passwords: they are kept out of reprs and error messages.
    model_config = SettingsConfigDict(env_prefix="SHARDQ_", frozen=True, extra="ignore", hide_input_in_errors=True)

    #: Hugging Face directory, hub id or GGUF file of the target model
    model: str
    #: first layer of the tail's half; None cuts in the middle, "auto" asks both machines' memory and pace
    split: Split | None = None
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    #: dtype of the hidden states between head and tail; None: that of `dtype`. Narrower ones change logits, so both
    #: halves must agree
    wire_dtype: Literal["float32", "float16", "bfloat16", "int8"] | None = None
    #: of the linear layers' weights; both halves must agree
    quantization: Quantization = "none"
    device: str = "cpu"
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
    drafter: Literal["none", "ngram", "suffix", "model", "hybrid"] = "ngram"
    #: the drafter's model for `drafter = "model"` and "hybrid"
    drafter_model: str | None = None
    #: of the drafter's own linear layers
    drafter_quantization: Quantization = "none"
    #: rounds in flight at the same time; "auto" asks measured times
    lanes: Annotated[int, Field(ge=1, le=MAX_LANES)] | Literal["auto"] = "auto"
    #: most lanes that "auto" uses
    max_lanes: int = Field(default=8, ge=1, le=MAX_LANES)
    #: tokens per prefill chunk; fewer where the link is slow
    prefill_chunk: int = Field(default=64, ge=1, le=MAX_QUERY)
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
    #: file for a timeline of draft, head, link and tail of every round (Chrome trace format); None writes none
    trace: str | None = None

    @property
    def num_slots(self) -> int:
        """The number of slots. Raises ValueError as long as "auto" was not replaced by what it comes to."""
        return int(self.slots)

    @property
    def max_query(self) -> int:
        """Most tokens a row of this head's frames brings."""
        return max(self.prefill_chunk, self.longest_draft + 1)

    @property
    def longest_draft(self) -> int:
        """Most tokens drafted for a row."""
        return self.max_draft_length if self.draft_length == "auto" else self.draft_length

    @property
    def link_lanes(self) -> int:
        """Lanes that the link to the tail has: the handshake fixes them."""
        return self.max_lanes if self.lanes == "auto" else self.lanes

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        return self.name or PurePath(self.model.partition("@")[0]).stem


class TailSettings(WorkerSettings):
    """The tail: second half, LM head, sampling and verification."""

    tail_name: str = Field(default_factory=socket.gethostname)
    #: most slots a head may ask for; "auto": as many as fit beside the weights
    slots: Slots = 64
