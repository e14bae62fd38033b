"""Batches as people and as programs read them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from cli.output import NOTHING, counted, duration, figure, moment, note, percent, print_table, print_values, state
from storage.batch_records import DEFAULT_PRIORITY, BatchFigures, BatchRow, Counts
from storage.states import TERMINAL_STATUSES, BatchStatus
from tasks.durations import shortest
from tasks.openai_batch import CHAT_URL

#: the `completion_window` of a batch that does not expire: strict clients want a text
NO_WINDOW = "never"


def print_batches(rows: list[BatchRow]) -> None:
    """Batches as a table, with a line about each that does not hold all of its file."""
    has_notes = any(row.metadata for row in rows)
    print_table(
        ["BATCH", "STATE", "JOBS", "ENDED", "FAILED", "STOPPED", "AGE", "NAME", *(["METADATA"] if has_notes else [])],
        [
            (
                row.id,
                state(row.status),
                row.counts.total,
                percent(row.counts.num_ended, row.counts.total),
                row.counts.failed,
                row.counts.cancelled + row.counts.expired,
                duration(time.time() - row.created_at),
                row.name or NOTHING,
                *([shown_metadata(row.metadata)] if has_notes else []),
            )
            for row in rows
        ],
        numbers={"JOBS", "ENDED", "FAILED", "STOPPED", "AGE"},
        whole={"BATCH"},  # to be copied from here
    )
    for row in rows:
        if not row.is_whole:
            note(f"{row.id} is {row.status}{_what_that_means(row)}")


def not_ended(counts: Counts) -> str:
    """That a batch has open jobs."""
    has = "has" if counts.num_open == 1 else "have"
    return f"{counts.num_open:,} of {counted(counts.total, 'job')} {has} not ended yet"


def print_batch(row: BatchRow, figures: BatchFigures) -> None:
    """One batch with its counts and figures."""
    values = {
        "batch": row.id + (f" ({row.name})" if row.name else ""),
        "state": f"{row.status}{_what_that_means(row)}",
        "jobs": states(row.counts),
        "left out": _left_out(row.num_invalid_lines),
        "metadata": shown_metadata(row.metadata),
        "priority": str(row.priority) if row.priority != DEFAULT_PRIORITY else None,
        "reused": f"{figures.reused} stored results of earlier jobs" if figures.reused else None,
        "created": moment(row.created_at),
        "expires": _expiry(row),
        "wall time": duration(figures.wall_s),
        "tokens": f"{figures.prompt_tokens:,} prompt, {figures.completion_tokens:,} completion",
        "speed": f"{figure(figures.batch_tps)} tokens/s in all, {figure(figures.median_decode_tps)} per job (median)",
        "rounds": f"{figures.rounds:,}: {figure(figures.tokens_per_round, 2)} tokens per round, "
        f"{percent(figures.accepted, figures.drafted)} of drafted tokens accepted",
        "first token": f"after {figure(figures.mean_ttft_s, 2)} s (mean)",
    }
    print_values(values)


def shown_metadata(metadata: dict[str, Any] | None) -> str | None:
    """Notes as `key=value, …`; None for none."""
    return ", ".join(f"{key}={value}" for key, value in metadata.items()) if metadata else None


def _left_out(num_lines: int) -> str | None:
    if not num_lines:
        return None
    return f"{counted(num_lines, 'line')} of the file, in no result (`submit --errors FILE` names them)"


def states(counts: Counts) -> str:
    """How many jobs there are, and in which states."""
    found = [f"{number:,} {name}" for name, number in asdict(counts).items() if number]
    if len(found) < 2:
        return found[0] if found else "0"
    return f"{counts.total:,}: {', '.join(found)}"


def _what_that_means(row: BatchRow) -> str:
    """What the status alone does not say. `completed` only says that every job has ended."""
    counts = row.counts
    if row.status == BatchStatus.VALIDATING:
        return f": {why_unpublished(row.id)}"
    if row.status == BatchStatus.CANCELLED and not row.is_whole:
        return f": {_why_never_whole(row.id)}"
    if row.status == BatchStatus.COMPLETED and not counts.completed:
        return ": not one job succeeded"
    if row.status == BatchStatus.COMPLETED and counts.completed < counts.total:
        return f": {counts.total - counts.completed} of {counted(counts.total, 'job')} did not succeed"
    if row.status == BatchStatus.CANCELLING:
        return f": {counted(counts.num_open, 'job')} still stopping"
    return ""


def why_unpublished(batch_id: str) -> str:
    """Why nothing of a validating batch runs, with the next step."""
    return f"its submission goes on or was cut off (submit it again, or `shardq delete {batch_id}`)"


def _why_never_whole(batch_id: str) -> str:
    return f"not all of its file was written (`shardq delete {batch_id}`, then submit it again)"


def _expiry(row: BatchRow) -> str | None:
    if row.expires_at is None:
        return None
    left = row.expires_at - time.time()
    is_open = row.status not in TERMINAL_STATUSES
    return moment(row.expires_at) + (f", in {duration(left)}" if is_open and left > 0 else "")


#: a batch's moments, as OpenAI's Batch object names them
_TIMESTAMPS = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)


def batch_json(row: BatchRow, figures: BatchFigures | None = None) -> dict[str, Any]:
    """A batch as an OpenAI Batch object (times in whole Unix seconds), with what is ours beside it."""
    counts = row.counts
    return {
        "id": row.id,
        "object": "batch",
        # None: of an older version, with lines for both
        "endpoint": row.endpoint or CHAT_URL,
        "model": row.parameters.get("model"),
        "errors": None,
        "input_file_id": f"file-{row.file_hash}",
        "completion_window": shortest(row.expires_at - row.created_at) if row.expires_at else NO_WINDOW,
        "status": row.status,
        **_files(row),
        **{name: _whole(getattr(row, name)) for name in _TIMESTAMPS},
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.num_ended - counts.completed,
        },
        "usage": usage_json(figures) if figures else None,
        "metadata": {**({"name": row.name} if row.name else {}), **(row.metadata or {})} or None,
        "name": row.name,
        "file_hash": row.file_hash,
        "parameters": row.parameters,
        "priority": row.priority,
        "num_invalid_lines": row.num_invalid_lines,
        "job_counts": asdict(counts),
        "ended": row.status in TERMINAL_STATUSES,
        **({"figures": figures_json(figures)} if figures else {}),
    }


def _files(row: BatchRow) -> dict[str, str | None]:
    """Names of the files that `shardq results` writes, once there is something for them."""
    counts, ended = row.counts, row.status in TERMINAL_STATUSES
    has_errors = counts.num_ended > counts.completed
    return {
        "output_file_id": f"file-{row.id}-output" if ended and counts.completed else None,
        "error_file_id": f"file-{row.id}-errors" if ended and has_errors else None,
    }


def _whole(timestamp: float | None) -> int | None:
    return None if timestamp is None else int(timestamp)


def usage_json(figures: BatchFigures) -> dict[str, Any]:
    """Tokens of a batch in the shape of OpenAI's `usage`."""
    return {
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": {"cached_tokens": figures.cached_tokens},
        "output_tokens": figures.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": figures.prompt_tokens + figures.completion_tokens,
    }


def figures_json(figures: BatchFigures) -> dict[str, Any]:
    """A batch's figures without the counts, which the batch has."""
    values = asdict(figures)
    del values["counts"]
    return values
