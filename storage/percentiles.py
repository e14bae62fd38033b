"""What is usual and what is rare in a batch: percentiles, endings and errors, counted by the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, literal, select

from storage.database import Database
from storage.states import JobState
from storage.tables import job

PERCENTILES = (50, 90, 99)
#: different errors that are told; the rest is left out
MAX_ERRORS = 20

#: figure → what it is of a job's row
_MEASURED: dict[str, ColumnElement[Any]] = {
    **{name: job.c[name] for name in ("ttft_s", "decode_tps", "e2e_tps")},
    "e2e_s": job.c.finished_at - job.c.started_at,
    **{name: job.c[name] for name in ("queue_s", "acceptance", "tokens_per_round")},
}
_PARTS_S = sum((func.coalesce(job.c[name], 0.0) for name in ("draft_s", "head_s", "link_s", "tail_s")), literal(0.0))
#: of one job, never less than 0: the parts of several completions overlap, which must not cost other jobs theirs
_OTHER_S = case((_MEASURED["e2e_s"] > _PARTS_S, _MEASURED["e2e_s"] - _PARTS_S), else_=0.0)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one figure over the jobs that have it."""

    num_jobs: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the figures of a batch's jobs spread; reused results, which generated nothing, are left out."""

    #: figure → percentiles; a figure that no job has is missing
    percentiles: Mapping[str, Percentiles]
    #: seconds in slots that drafting, head, link and tail do not explain, all jobs together
    other_s: float
    #: finish reason of the completed jobs → how many, reused results too
    finish_reasons: Mapping[str, int]
    #: error code → how many jobs have it, most frequent first
    errors: Mapping[str, int]


def distribution(db: Database, batch_id: str) -> Distribution:
    """Of the jobs of a batch that have ended. Percentiles are interpolated between the two nearest values."""
    of_batch = job.c.batch_id == batch_id
    generated = [of_batch, job.c.reused_from.is_(None)]
    completed = [of_batch, job.c.state == JobState.COMPLETED]
    with db.read() as connection:
        found = {name: _percentiles(connection, column, generated) for name, column in _MEASURED.items()}
        other = select(func.coalesce(func.sum(_OTHER_S), 0.0)).where(*generated)
        return Distribution(
            percentiles={name: values for name, values in found.items() if values is not None},
            other_s=float(connection.execute(other).scalar_one()),
            finish_reasons=_counts(connection, job.c.finish_reason, completed),
            errors=_counts(connection, job.c.error_type, [of_batch]),
        )


def _percentiles(
    connection: Connection, column: ColumnElement[Any], conditions: list[ColumnElement[bool]]
) -> Percentiles | None:
    measured = [*conditions, column.is_not(None)]
    number = connection.execute(select(func.count()).where(*measured)).scalar_one()
    if not number:
        return None
    places = [(number - 1) * percentile / 100 for percentile in PERCENTILES]
    ranks = {rank for place in places for rank in (floor(place), ceil(place))}
    ordered = select(column.label("value"), func.row_number().over(order_by=column).label("rank"))
    numbered = ordered.where(*measured).subquery()
    query = select(numbered.c.rank, numbered.c.value).where(numbered.c.rank.in_([rank + 1 for rank in ranks]))
    values = {rank - 1: float(value) for rank, value in connection.execute(query)}
    return Percentiles(number, *(_between(values, place) for place in places))


def _between(values: Mapping[int, float], place: float) -> float:
    low, high = values[floor(place)], values[ceil(place)]
    return low + (high - low) * (place - floor(place))


def _counts(
    connection: Connection, column: ColumnElement[Any], conditions: list[ColumnElement[bool]]
) -> dict[str, int]:
    query = select(column, func.count()).where(*conditions, column.is_not(None)).group_by(column)
    rows = connection.execute(query.order_by(func.count().desc(), column).limit(MAX_ERRORS))
    return {str(value): int(number) for value, number in rows}
