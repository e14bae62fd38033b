"""What a batch's pictures show, gathered from its jobs' rows. Reused results generated nothing: no times of theirs."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from storage.database import Database
from storage.spread import Spread
from storage.states import TERMINAL_STATES, JobState
from storage.tables import job

#: intervals of the series over time
NUM_INTERVALS = 96
#: slowest jobs, and kinds of errors, that are named
NUM_SLOWEST = 10
NUM_ERRORS = 20
#: a batch that took no time at all still has intervals
_SHORTEST_S = 0.001
#: rows read at a time
_PAGE = 1000

_HAS_TIMES = (job.c.started_at.is_not(None), job.c.finished_at >= job.c.started_at, job.c.reused_from.is_(None))


@dataclass(frozen=True, slots=True)
class OverTime:
    """Series over equal intervals, from the first slot to the last token, by the heads' clocks."""

    #: Unix time
    start: float
    width_s: float
    #: each job's tokens are spread evenly from its first token to its last
    tokens_per_s: tuple[float, ...]
    #: mean number of jobs that had a slot
    jobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SlowJob:
    """One of the jobs that took longest from slot to last token."""

    custom_id: str
    state: str
    latency_s: float
    queue_s: float | None
    ttft_s: float | None
    completion_tokens: int | None
    decode_tps: float | None


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Jobs that ended without success in the same way."""

    state: str
    error_type: str | None
    number: int
    #: one of their messages
    example: str | None


@dataclass(frozen=True, slots=True)
class BatchSeries:
    """Series and distributions of a batch over the jobs that have ended."""

    #: None without a job that had a slot
    over_time: OverTime | None
    #: seconds, ascending
    ttft_s: array[float]
    latency_s: array[float]
    #: as in `storage.job_records.OutcomeRow`, summed over jobs
    rounds_by_draft: tuple[tuple[int, ...], ...]
    slowest: tuple[SlowJob, ...]
    errors: tuple[ErrorKind, ...]
    #: reason → completed jobs, the most frequent first; reused results are in it
    finish_reasons: dict[str, int]


def batch_series(db: Database, batch_id: str) -> BatchSeries:
    """The series of a batch, running or ended; empty ones if nothing has ended.

    Memory: 16 bytes a job, besides the rows of one page.
    """
    ttft_s, latency_s = array("d"), array("d")
    with db.read() as connection:
        over_time = _walk(connection, batch_id, ttft_s, latency_s)
        return BatchSeries(
            over_time=over_time,
            ttft_s=array("d", sorted(ttft_s)),
            latency_s=array("d", sorted(latency_s)),
            rounds_by_draft=rounds_by_draft(connection, batch_id),
            slowest=_slowest(connection, batch_id),
            errors=_errors(connection, batch_id),
            finish_reasons=_finish_reasons(connection, batch_id),
        )


def rounds_by_draft(connection: Connection, batch_id: str) -> tuple[tuple[int, ...], ...]:
    """A batch's rounds by length of the draft and tokens accepted; empty if no head counted them."""
    total: list[list[int]] = []
    query = select(job.c.rounds_by_draft).where(job.c.batch_id == batch_id, job.c.rounds_by_draft.is_not(None))
    for row in _rows(connection, query):
        for drafted, counts in enumerate(json.loads(row.rounds_by_draft)):
            if drafted == len(total):
                total.append([0] * (drafted + 1))
            for accepted, count in enumerate(counts):
                total[drafted][accepted] += count
    return tuple(tuple(counts) for counts in total)


def _walk(connection: Connection, batch_id: str, ttft_s: array[float], latency_s: array[float]) -> OverTime | None:
    """Fill the arrays with every job's times; the series over time."""
    ours = (job.c.batch_id == batch_id, *_HAS_TIMES)
    start, end = connection.execute(select(func.min(job.c.started_at), func.max(job.c.finished_at)).where(*ours)).one()
    if start is None:
        return None
    width_s = max(_SHORTEST_S, end - start) / NUM_INTERVALS
    tokens, jobs = Spread(start, width_s, NUM_INTERVALS), Spread(start, width_s, NUM_INTERVALS)
    columns = (job.c.started_at, job.c.finished_at, job.c.ttft_s, job.c.completion_tokens)
    for row in _rows(connection, select(*columns).where(*ours)):
        begun, ended, first, number = tuple(row)
        jobs.add(begun, ended, ended - begun)
        latency_s.append(ended - begun)
        if first is not None:
            ttft_s.append(first)
            tokens.add(min(ended, begun + first), ended, number or 0)
    return OverTime(start, width_s, tokens.per_s(), jobs.per_s())


def _rows(connection: Connection, query: Any) -> Iterator[Row[Any]]:
    """The rows of a query, a page in memory at a time."""
    yield from connection.execute(query, execution_options={"yield_per": _PAGE})


def _slowest(connection: Connection, batch_id: str) -> tuple[SlowJob, ...]:
    latency_s = (job.c.finished_at - job.c.started_at).label("latency_s")
    columns = (job.c.queue_s, job.c.ttft_s, job.c.completion_tokens, job.c.decode_tps)
    query = select(job.c.custom_id, job.c.state, latency_s, *columns).where(job.c.batch_id == batch_id, *_HAS_TIMES)
    found = connection.execute(query.order_by(latency_s.desc(), job.c.line).limit(NUM_SLOWEST))
    return tuple(SlowJob(*row) for row in found)


def _errors(connection: Connection, batch_id: str) -> tuple[ErrorKind, ...]:
    kinds = (job.c.state, job.c.error_type)
    number = func.count().label("number")
    failed = [job.c.batch_id == batch_id, job.c.state.in_(TERMINAL_STATES - {JobState.COMPLETED})]
    query = select(*kinds, number, func.min(job.c.error_message)).where(*failed).group_by(*kinds)
    found = connection.execute(query.order_by(number.desc(), *kinds).limit(NUM_ERRORS))
    return tuple(ErrorKind(*row) for row in found)


def _finish_reasons(connection: Connection, batch_id: str) -> dict[str, int]:
    number = func.count().label("number")
    completed = [job.c.batch_id == batch_id, job.c.state == JobState.COMPLETED, job.c.finish_reason.is_not(None)]
    query = select(job.c.finish_reason, number).where(*completed).group_by(job.c.finish_reason)
    return {row.finish_reason: row.number for row in connection.execute(query.order_by(number.desc()))}
