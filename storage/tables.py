"""The tables. Times are Unix seconds (UTC) by the clock of the machine that writes, unless said otherwise."""

from __future__ import annotations

import json

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator

from storage.states import IN_FLIGHT_STATES, OPEN_STATES, JobState

#: marks a text stored as JSON because the database could not hold it as it is
_ESCAPED = "\\json:"


class ExactText(TypeDecorator[str]):
    """A text that comes back exactly, whatever a model wrote.

    PostgreSQL has no NUL in texts, SQLite's shell stops at one, and no database takes a lone surrogate. Such
    a text is stored as a marked JSON string; any other as it is, to be read with the database's own tools.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not (value.startswith(_ESCAPED) or "\0" in value or _has_surrogate(value)):
            return value
        return _ESCAPED + json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not value.startswith(_ESCAPED):
            return value
        return str(json.loads(value[len(_ESCAPED) :]))


def _has_surrogate(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

#: one row: which database this is (`storage.identity`)
identity = Table(
    "identity",
    metadata,
    #: made with the tables; a copy or a backup has the same
    Column("id", String, primary_key=True),
    #: random, renewed by the bookkeeper that writes here; and the one before
    Column("mark", String),
    Column("mark_before", String),
)

#: what is remembered of a deleted batch, so that a late outcome of it is known for what it is
deleted_batch = Table(
    "deleted_batch",
    metadata,
    Column("id", String, primary_key=True),
    Column("deleted_at", Double, nullable=False),
)

#: totals that belong to no row, such as records of unknown jobs
counter = Table(
    "counter",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

#: served models, mirrored from the queue server's registry
model = Table(
    "model",
    metadata,
    Column("name", String, primary_key=True),
    #: JSON of the profile every head of this name has
    Column("profile", Text, nullable=False),
    Column("updated_at", Double, nullable=False),
)

batch = Table(
    "batch",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, unique=True),
    #: hex digest of the submitted file
    Column("file_hash", String, nullable=False),
    Column("status", String, nullable=False),
    #: the first line's; of an older version none where lines have several
    Column("endpoint", String),
    #: JSON object of the defaults given at submission
    Column("parameters", Text, nullable=False),
    #: JSON object of the user's own notes; so has a job
    Column("metadata", Text),
    #: 0 to 9; 0 is served first, as in Celery on Redis
    Column("priority", Integer, nullable=False),
    #: invalid lines that were skipped
    Column("num_invalid_lines", Integer, nullable=False),
    #: random; only the submission that knows it may write to a validating batch
    Column("submission", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expires_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    #: seconds between its ends and the retries that followed
    Column("idle_s", Double, nullable=False, server_default=text("0")),
    Index("batch_by_status", "status", "in_progress_at"),
)


def _one_of(states: frozenset[JobState]) -> str:
    return f"state IN ({', '.join(repr(state.value) for state in sorted(states))})"


# SQLite takes a partial index only where the query repeats its condition literally.
IS_WAITING = text(f"state = '{JobState.WAITING}'")
IS_IN_FLIGHT = text(_one_of(IN_FLIGHT_STATES))
IS_STOPPING = text(f"stop_reason IS NOT NULL AND {_one_of(IN_FLIGHT_STATES)}")
IS_EXPIRING = text(f"expires_at IS NOT NULL AND stop_reason IS NULL AND {_one_of(OPEN_STATES)}")
#: a result of its own, which other jobs may take over
IS_REUSABLE = text(f"request_key IS NOT NULL AND reused_from IS NULL AND state = '{JobState.COMPLETED}'")

# The large texts stand last: SQLite then reads the other columns without following overflow pages.
job = Table(
    "job",
    metadata,
    Column("id", String, primary_key=True),
    Column("batch_id", String, ForeignKey("batch.id"), nullable=False),
    #: 1-based line of the submitted file
    Column("line", Integer, nullable=False),
    Column("custom_id", String, nullable=False),
    #: served name
    Column("model", String, nullable=False),
    Column("url", String, nullable=False),
    Column("state", String, nullable=False),
    #: only a user's retry raises it
    Column("attempt", Integer, nullable=False),
    #: publications to the queue, all attempts together
    Column("deliveries", Integer, nullable=False),
    Column("request_bytes", Integer, nullable=False),
    #: first publication of this attempt
    Column("queued_at", Double),
    #: latest publication of this attempt
    Column("claimed_at", Double),
    Column("recorded_at", Double),
    #: the job's own deadline
    Column("expires_at", Double),
    #: the database has decided that the job shall end, and when
    Column("stop_reason", String),
    Column("stop_at", Double),
    #: digest of what determines the text, the profile apart
    Column("request_key", String),
    #: digest of the served name's profile when the outcome was recorded
    Column("profile_key", String),
    #: the job whose result this one has taken over
    Column("reused_from", String),
    Column("head", String),
    Column("finish_reason", String),
    Column("error_type", String),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    #: when the job got its slot and when its last token was committed, by the head's clock
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("ttft_s", Double),
    Column("decode_tps", Double),
    Column("e2e_tps", Double),
    Column("rounds", Integer),
    Column("tokens_per_round", Double),
    Column("drafted", Integer),
    Column("accepted", Integer),
    Column("acceptance", Double),
    Column("cached_tokens", Integer),
    Column("wire_bytes_up", BigInteger),
    Column("wire_bytes_down", BigInteger),
    Column("draft_s", Double),
    Column("head_s", Double),
    Column("link_s", Double),
    Column("tail_s", Double),
    #: of the hidden states between head and tail
    Column("wire_dtype", String),
    #: JSON: see `storage.job_records.OutcomeRow`
    Column("rounds_by_draft", Text),
    #: from `queued_at` to `started_at`; two clocks, so never less than 0
    Column("queue_s", Double),
    #: records of the current attempt after its first terminal one, and records of other attempts
    Column("duplicate_records", Integer, nullable=False),
    Column("stale_records", Integer, nullable=False),
    Column("error_message", ExactText),
    Column("request", Text, nullable=False),
    Column("text", ExactText),
    #: JSON list of the completion's token ids
    Column("token_ids", Text),
    #: JSON list of the completions after the first
    Column("choices", Text),
    #: JSON list of the log probabilities of every completion, the first one's first
    Column("logprobs", Text),
    Column("metadata", Text),
    UniqueConstraint("batch_id", "line"),
    UniqueConstraint("batch_id", "custom_id"),
    # Counts and completion tokens of a batch come from this index alone.
    Index("job_by_state", "batch_id", "state", "completion_tokens", "reused_from"),
    Index("job_waiting", "batch_id", "model", "line", sqlite_where=IS_WAITING, postgresql_where=IS_WAITING),
    Index("job_in_flight", "model", "batch_id", sqlite_where=IS_IN_FLIGHT, postgresql_where=IS_IN_FLIGHT),
    Index("job_stopping", "stop_at", sqlite_where=IS_STOPPING, postgresql_where=IS_STOPPING),
    Index("job_expiring", "expires_at", sqlite_where=IS_EXPIRING, postgresql_where=IS_EXPIRING),
    Index("job_reusable", "request_key", sqlite_where=IS_REUSABLE, postgresql_where=IS_REUSABLE),
)
