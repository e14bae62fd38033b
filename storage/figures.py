"""A batch's figures, computed by the database from its jobs' rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, func, select

from storage.batch_records import END_TIMES, BatchFigures
from storage.batches import count_jobs
from storage.database import Database
from storage.errors import BatchNotFound
from storage.tables import batch, job

_SUMS = (
    "prompt_tokens",
    "completion_tokens",
    "rounds",
    "drafted",
    "accepted",
    "cached_tokens",
    "wire_bytes_up",
    "wire_bytes_down",
    "duplicate_records",
    "stale_records",
)
_SECONDS = ("draft_s", "head_s", "link_s", "tail_s", "queue_s")
_MEANS = ("decode_tps", "e2e_tps", "ttft_s")


def batch_figures(db: Database, batch_id: str) -> BatchFigures:
    """The figures of a batch, running or ended. Raises BatchNotFound.

    Jobs that took over a stored result generated nothing: only their number is told.
    Means and median are over the jobs that have the figure; tokens per round and acceptance are weighted by
    rounds and drafted tokens. Wall time: by the clock of the database's machine, less the time
    between an end and the retry that followed.
    """
    with db.read() as connection:
        found = connection.execute(select(batch).where(batch.c.id == batch_id)).mappings().one_or_none()
        if found is None:
            raise BatchNotFound(batch_id)
        sums = connection.execute(_sums(batch_id)).mappings().one()
        median = _median(connection, batch_id, job.c.decode_tps)
        reused = select(func.count()).where(job.c.batch_id == batch_id, job.c.reused_from.is_not(None))
        num_reused = connection.execute(reused).scalar_one()
        counts = count_jobs(connection, [batch_id])[batch_id]
    wall_s = _wall_s(found, db.now())
    integers: dict[str, Any] = {name: int(sums[name]) for name in _SUMS}
    seconds: dict[str, Any] = {name: float(sums[name]) for name in _SECONDS}
    return BatchFigures(
        counts=counts,
        wall_s=wall_s,
        batch_tps=_ratio(integers["completion_tokens"], wall_s),
        median_decode_tps=median,
        tokens_per_round=_ratio(sums["round_tokens"], integers["rounds"]),
        acceptance=_ratio(integers["accepted"], integers["drafted"]),
        **integers,
        **seconds,
        **{f"mean_{name}": sums[f"mean_{name}"] for name in _MEANS},
        reused=num_reused,
    )


def _sums(batch_id: str) -> Any:
    round_tokens = func.sum(job.c.tokens_per_round * job.c.rounds)
    return select(
        func.coalesce(round_tokens, 0.0).label("round_tokens"),
        *[func.coalesce(func.sum(job.c[name]), 0).label(name) for name in (*_SUMS, *_SECONDS)],
        *[func.avg(job.c[name]).label(f"mean_{name}") for name in _MEANS],
    ).where(job.c.batch_id == batch_id, job.c.reused_from.is_(None))


def _median(connection: Connection, batch_id: str, column: ColumnElement[Any]) -> float | None:
    """The median of a column over the rows that have it; None without one. SQLite has no function for it."""
    measured = [job.c.batch_id == batch_id, column.is_not(None)]
    number = connection.execute(select(func.count()).where(*measured)).scalar_one()
    middle = select(column).where(*measured).order_by(column).offset((number - 1) // 2).limit(2 - number % 2)
    values = connection.execute(middle).scalars().all() if number else []
    return sum(values) / len(values) if values else None


def _wall_s(found: RowMapping, now: float) -> float | None:
    if found["in_progress_at"] is None:
        return None
    end = next((found[name] for name in END_TIMES if found[name] is not None), now)
    return max(0.0, float(end) - float(found["in_progress_at"]) - float(found["idle_s"]))


def _ratio(amount: float, per: float | None) -> float | None:
    return float(amount) / per if per else None
