"""The record of how attempts ended: each attempt ends once, whatever is delivered how often."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

from storage.database import Database
from storage.endings import end_batches, explanation, lock_batches_of
from storage.job_records import Fate, OutcomeRow, Recorded
from storage.served_models import profile_keys
from storage.states import STOP_ENDS, TERMINAL_STATES, JobState
from storage.tables import counter, deleted_batch, job

#: name of the counter of records whose job is not in the database
UNKNOWN_RECORDS = "unknown_records"

#: columns that do not hold what the row says as it is
_WRITTEN = ("state", "token_ids", "choices", "rounds_by_draft")
_COPIED = [name for name in OutcomeRow.__slots__ if name in job.c and name not in _WRITTEN]
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def record_outcomes(db: Database, outcomes: Sequence[OutcomeRow]) -> Recorded:
    """Record how attempts ended, in one transaction; at most 1,000 outcomes, about 200 are best.

    The first terminal record of a job's current attempt wins. Later ones, and those of earlier attempts, are counted
    in the job's row and change nothing else; those of jobs that are not here are counted in `counter`. No clock
    decides. A stopped outcome gets the error code of its stop, and keeps its text. A batch without an open job ends
    with it.
    """
    if not outcomes:
        return Recorded((), (), ())
    now = db.now()
    with db.write() as connection:
        current = _lock(connection, sorted({outcome.job for outcome in outcomes}))
        deleted = _deleted(connection, {outcome.job for outcome in outcomes} - current.keys())
        profiles = profile_keys(connection, {row.model for row in current.values()})
        fates = _fates(outcomes, current, deleted)
        jobs_of: dict[Fate, list[str]] = {fate: [] for fate in Fate}
        applied = []
        for outcome, fate in zip(outcomes, fates, strict=True):
            jobs_of[fate].append(outcome.job)
            if fate is Fate.APPLIED:
                row = current[outcome.job]
                applied.append(_values(outcome, row.queued_at, now) | {"profile_key": profiles.get(row.model)})
        _apply(connection, applied, now)
        _count(connection, "duplicate_records", jobs_of[Fate.DUPLICATE])
        _count(connection, "stale_records", jobs_of[Fate.STALE])
        _count_unknown(connection, len(jobs_of[Fate.UNKNOWN]) + len(jobs_of[Fate.DELETED]))
        touched = sorted({current[job_id].batch_id for job_id in jobs_of[Fate.APPLIED]})
        ended = end_batches(connection, touched, now)
    models = tuple(current[outcome.job].model if outcome.job in current else None for outcome in outcomes)
    return Recorded(fates, models, tuple(ended))


def _fates(
    outcomes: Sequence[OutcomeRow], current: Mapping[str, Row[Any]], deleted: Collection[str]
) -> tuple[Fate, ...]:
    """What becomes of each outcome, those before it being recorded."""
    ended = {row.id for row in current.values() if JobState(row.state) in TERMINAL_STATES}
    fates = []
    for outcome in outcomes:
        row = current.get(outcome.job)
        if row is None:
            fate = Fate.DELETED if outcome.job in deleted else Fate.UNKNOWN
        elif outcome.attempt != row.attempt:
            # A later attempt than any here: this database is a backup from before that retry.
            fate = Fate.STALE if outcome.attempt < row.attempt else Fate.UNKNOWN
        else:
            fate = Fate.DUPLICATE if outcome.job in ended else Fate.APPLIED
            ended.add(outcome.job)
        fates.append(fate)
    return tuple(fates)


def _deleted(connection: Connection, job_ids: Collection[str]) -> set[str]:
    """Those of these jobs whose batch was deleted here."""
    batches = {job_id: job_id.rpartition("-")[0] for job_id in job_ids}
    query = select(deleted_batch.c.id).where(deleted_batch.c.id.in_(sorted(set(batches.values()))))
    found = set(connection.execute(query).scalars()) if batches else set()
    return {job_id for job_id, batch_id in batches.items() if batch_id in found}


def unknown_records(db: Database) -> int:
    """How many records named a job that is not in the database."""
    query = select(counter.c.value).where(counter.c.name == UNKNOWN_RECORDS)
    with db.read() as connection:
        return int(connection.execute(query).scalar_one_or_none() or 0)


def _lock(connection: Connection, job_ids: Sequence[str]) -> dict[str, Row[Any]]:
    """Lock the jobs' batches, then the jobs, so that no two recorders miss each other's last job."""
    lock_batches_of(connection, job_ids)
    columns = [job.c.id, job.c.attempt, job.c.state, job.c.batch_id, job.c.model, job.c.queued_at]
    query = select(*columns).where(job.c.id.in_(job_ids)).order_by(job.c.id).with_for_update()
    return {row.id: row for row in connection.execute(query)}


def _values(outcome: OutcomeRow, queued_at: float | None, now: float) -> dict[str, Any]:
    """The columns to write; keys as `_apply` binds them."""
    if outcome.state not in TERMINAL_STATES:
        raise ValueError(f"{outcome.state} is no end of a job")
    values: dict[str, Any] = {name: getattr(outcome, name) for name in _COPIED}
    num_tokens = len(outcome.token_ids) + sum(len(choice.token_ids) for choice in outcome.choices)
    queue_s = _difference(outcome.started_at, queued_at)
    return values | {
        "job_id": outcome.job,
        "state": outcome.state,
        "token_ids": _ENCODER.encode(outcome.token_ids),
        "choices": _ENCODER.encode([asdict(choice) for choice in outcome.choices]) if outcome.choices else None,
        "rounds_by_draft": _ENCODER.encode(outcome.rounds_by_draft) if outcome.rounds_by_draft else None,
        "completion_tokens": num_tokens,
        "e2e_tps": _rate(num_tokens, _difference(outcome.finished_at, outcome.started_at)),
        "acceptance": _rate(outcome.accepted or 0, outcome.drafted),
        # Two clocks: the head's may be behind.
        "queue_s": None if queue_s is None else max(0.0, queue_s),
        "recorded_at": now,
    }


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


def _rate(amount: int, per: float | None) -> float | None:
    return amount / per if per is not None and per > 0 else None


def _apply(connection: Connection, rows: list[dict[str, Any]], now: float) -> None:
    if rows:
        connection.execute(job.update().where(job.c.id == bindparam("job_id")), rows)
    for reason, state in STOP_ENDS.items():
        stopped = [row["job_id"] for row in rows if row["state"] is state]
        if stopped:
            connection.execute(job.update().where(job.c.id.in_(stopped)).values(explanation(reason, now)))


def _count(connection: Connection, column: str, job_ids: Sequence[str]) -> None:
    if job_ids:
        update = job.update().where(job.c.id == bindparam("job_id")).values({column: job.c[column] + 1})
        connection.execute(update, [{"job_id": job_id} for job_id in sorted(job_ids)])


def _count_unknown(connection: Connection, number: int) -> None:
    if number:
        add = counter.update().where(counter.c.name == UNKNOWN_RECORDS).values(value=counter.c.value + number)
        if connection.execute(add).rowcount == 0:
            connection.execute(counter.insert().values(name=UNKNOWN_RECORDS, value=number))
