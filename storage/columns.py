"""The columns of a job that people may ask for by name, and what kind of value each has."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import BigInteger, Double, Integer

from storage.tables import job


class Kind(StrEnum):
    """What a column holds. Any may be empty."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    #: Unix seconds
    TIME = "time"


def _kind(name: str) -> Kind:
    if name.endswith("_at"):
        return Kind.TIME
    stored = job.c[name].type
    if isinstance(stored, Integer | BigInteger):
        return Kind.INTEGER
    return Kind.NUMBER if isinstance(stored, Double) else Kind.TEXT


#: column → kind, in the order in which results show them; `docs/schema.md` says what each means
JOB_COLUMNS: dict[str, Kind] = {
    name: _kind(name)
    for name in (
        *("custom_id", "line", "model", "state", "finish_reason", "error_type", "error_message", "text"),
        *("prompt_tokens", "completion_tokens", "ttft_s", "decode_tps", "e2e_tps", "rounds", "tokens_per_round"),
        *("drafted", "accepted", "acceptance", "cached_tokens", "wire_bytes_up", "wire_bytes_down"),
        *("queue_s", "draft_s", "head_s", "link_s", "tail_s", "started_at", "finished_at", "head", "attempt"),
        *("wire_dtype", "reused_from", "id", "batch_id", "url", "queued_at", "recorded_at", "deliveries"),
        *("request_bytes", "duplicate_records", "stale_records", "stop_reason"),
    )
}
