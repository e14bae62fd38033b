"""Jobs, as they go into the database and as they come out: one frozen dataclass per kind of row.

Times are Unix seconds, durations seconds, sizes bytes. `docs/glossary.md` defines the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from storage.states import JobState, StopReason


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked line of the file."""

    #: 1-based
    line: int
    custom_id: str
    #: served name
    model: str
    #: endpoint of the line
    url: str
    #: JSON text of the request for the engine
    request: str
    #: the job's own deadline
    expires_at: float | None = None
    #: JSON text of the user's notes
    metadata: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job to be published to its queue."""

    id: str
    attempt: int
    batch_id: str
    custom_id: str
    model: str
    priority: int
    #: JSON text of the request for the engine
    request: str
    request_bytes: int


@dataclass(frozen=True, slots=True)
class InFlightJob:
    """A job that should be in its queue or in an engine."""

    id: str
    attempt: int
    batch_id: str
    state: JobState
    #: latest publication
    claimed_at: float
    deliveries: int
    head: str | None


@dataclass(frozen=True, slots=True)
class Window:
    """What is in flight for one model."""

    num_jobs: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RunningJob:
    """An engine's report that an attempt is live."""

    id: str
    attempt: int
    head: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a cancellation or an expiry did."""

    #: jobs that nobody held and that have ended
    ended: int
    #: jobs in flight that are to stop
    stopping: int


@dataclass(frozen=True, slots=True)
class PendingStop:
    """A job in flight that is to stop."""

    id: str
    attempt: int
    model: str
    reason: StopReason
    #: when it was decided
    stop_at: float

    @property
    def task_id(self) -> str:
        """The Celery task of the attempt."""
        return f"{self.id}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A completion of a job after the first."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """The end of one attempt, as a head reports it. Figures are None where the job never got that far."""

    job: str
    attempt: int
    head: str
    #: a terminal state
    state: JobState
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    prompt_tokens: int | None = None
    started_at: float | None = None
    finished_at: float | None = None
    ttft_s: float | None = None
    decode_tps: float | None = None
    rounds: int | None = None
    tokens_per_round: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    cached_tokens: int | None = None
    wire_bytes_up: int | None = None
    wire_bytes_down: int | None = None
    draft_s: float | None = None
    head_s: float | None = None
    link_s: float | None = None
    tail_s: float | None = None
    wire_dtype: str | None = None
    #: entry k: of the rounds that drafted k tokens, k + 1 counts by how many of them were accepted; empty if unknown
    rounds_by_draft: tuple[tuple[int, ...], ...] = ()
    choices: tuple[ChoiceRow, ...] = ()
    #: JSON list with the log probabilities of every completion; None if none were asked for
    logprobs: str | None = None


class Fate(StrEnum):
    """What became of one outcome."""

    APPLIED = "applied"
    #: the attempt had already ended
    DUPLICATE = "duplicate"
    #: of an attempt before the current one
    STALE = "stale"
    #: its batch was deleted here
    DELETED = "deleted"
    #: of a job, or an attempt of one, that this database has never had
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of a list of outcomes."""

    #: of each of them, in their order
    fates: tuple[Fate, ...]
    #: the served name of each one's job; None where there is no such job
    models: tuple[str | None, ...]
    #: batches that ended with these outcomes
    ended_batches: tuple[str, ...]

    def count(self, fate: Fate) -> int:
        """How many outcomes it befell."""
        return self.fates.count(fate)


@dataclass(frozen=True, slots=True)
class JobRow:
    """A stored job with its outcome and figures."""

    id: str
    batch_id: str
    line: int
    custom_id: str
    model: str
    url: str
    state: JobState
    attempt: int
    deliveries: int
    request_bytes: int
    queued_at: float | None
    claimed_at: float | None
    recorded_at: float | None
    head: str | None
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error_type: str | None
    error_message: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    started_at: float | None
    finished_at: float | None
    ttft_s: float | None
    decode_tps: float | None
    e2e_tps: float | None
    rounds: int | None
    tokens_per_round: float | None
    drafted: int | None
    accepted: int | None
    acceptance: float | None
    cached_tokens: int | None
    wire_bytes_up: int | None
    wire_bytes_down: int | None
    draft_s: float | None
    head_s: float | None
    link_s: float | None
    tail_s: float | None
    #: of the hidden states between head and tail
    wire_dtype: str | None
    queue_s: float | None
    duplicate_records: int
    stale_records: int
    #: a stop was decided for this attempt, whatever came first
    stop_reason: StopReason | None = None
    #: the job whose result this one has taken over
    reused_from: str | None = None
    #: as in `OutcomeRow`
    rounds_by_draft: tuple[tuple[int, ...], ...] = ()
    #: the completions after the first; `text`, `token_ids` and `finish_reason` are the first one's
    choices: tuple[ChoiceRow, ...] = ()
    #: as in `OutcomeRow`; None also where they were not read
    logprobs: str | None = None
    #: the user's notes
    metadata: dict[str, Any] | None = None
    #: JSON text of the request for the engine; None where it was not read
    request: str | None = None

    @property
    def num_choices(self) -> int:
        """Completions that there are."""
        return 1 + len(self.choices)
