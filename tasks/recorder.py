"""Carry records from the results stream into the database, each exactly once in effect.

A record leaves the stream only after the transaction that holds it. A crash in between brings it again; the
database then counts a duplicate and changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from storage.database import Database
from storage.job_records import ChoiceRow, Fate, OutcomeRow, RunningJob
from storage.jobs import mark_running
from storage.outcomes import record_outcomes
from storage.states import JobState
from tasks.errors import RecordInvalid
from tasks.generation import Metrics, Outcome
from tasks.logprobs import pack
from tasks.results import Record, ResultsReader, Started, decode
from tasks.tally import Tally

log = logging.getLogger(__name__)

#: figures that a metrics record and an outcome row share
_FIGURES = tuple(name for name in Metrics.__slots__ if name in OutcomeRow.__slots__)

Row = TypeVar("Row")


class Recorder:
    """Reads, records, then settles."""

    def __init__(self, database: Database, reader: ResultsReader, tally: Tally | None = None) -> None:
        self._database = database
        #: counts what is recorded
        self.tally = tally or Tally()
        self._reader = reader

    def record(self, block_ms: int) -> int:
        """Record what waits, up to one transaction's worth; waits up to `block_ms` for something to come.

        Returns the number of records that left the stream. After any exception they are still there.
        """
        try:
            return self._record(block_ms)
        except BaseException:
            self._reader.reread()
            raise

    def _record(self, block_ms: int) -> int:
        entries = dict(self._reader.read(block_ms))
        records = [record for entry, fields in entries.items() if (record := _decoded(entry, fields))]
        started = [(r.entry, _running(r.content)) for r in records if isinstance(r.content, Started)]
        outcomes = [(r.entry, outcome_row(r.content)) for r in records if isinstance(r.content, Outcome)]
        fates = {**store(started, self._mark_running), **store(outcomes, self._record_outcomes)}
        self._reader.settle([entry for entry, fate in fates.items() if fate is not Fate.UNKNOWN])
        for entry, fields in entries.items():
            if fates.get(entry) is Fate.UNKNOWN:
                self._reader.put_aside(entry, fields)
            elif entry not in fates:
                self._reader.reject(entry, fields)
        return len(entries)

    def _mark_running(self, rows: Sequence[RunningJob]) -> Sequence[Fate]:
        mark_running(self._database, rows)
        return [Fate.APPLIED] * len(rows)

    def _record_outcomes(self, rows: Sequence[OutcomeRow]) -> Sequence[Fate]:
        recorded = record_outcomes(self._database, rows)
        ends = zip(rows, recorded.fates, recorded.models, strict=True)
        self.tally.recorded((str(model), row) for row, fate, model in ends if fate is Fate.APPLIED)
        for row, fate in zip(rows, recorded.fates, strict=True):
            told = {"job": row.job, "attempt": row.attempt, "state": str(row.state)}
            if fate is Fate.APPLIED:
                log.info("outcome recorded", extra=told)
            elif fate is Fate.UNKNOWN:
                log.error("outcome put aside, this database has no such job: `shardq rejected` shows it", extra=told)
            else:
                log.info("outcome not applied: %s", fate, extra=told)
        for batch in recorded.ended_batches:
            log.info("batch %s has ended", batch)
        return recorded.fates


def _decoded(entry: bytes, fields: dict[bytes, bytes] | None) -> Record | None:
    try:
        return decode(entry, fields)
    except RecordInvalid as error:
        log.error("put aside a record that cannot be read: %s", error)
        return None


def store(rows: Sequence[tuple[bytes, Row]], write: Callable[[Sequence[Row]], Sequence[Fate]]) -> dict[bytes, Fate]:
    """Write the rows of some entries in one transaction; what became of each entry.

    A row the database cannot hold must not keep the others out: then each is written alone, and the entries of those
    that fail are left out.
    """
    try:
        fates = write([row for _, row in rows])
    except (TypeError, ValueError, OverflowError) as error:
        if len(rows) == 1:
            log.error("put aside a record the database cannot hold: %s", error)
            return {}
        return {entry: fate for item in rows for entry, fate in store([item], write).items()}
    return {entry: fate for (entry, _), fate in zip(rows, fates, strict=True)}


def _running(started: Started) -> RunningJob:
    return RunningJob(started.job, started.attempt, started.head)


def outcome_row(outcome: Outcome) -> OutcomeRow:
    """What the database keeps of an outcome."""
    metrics = outcome.metrics
    return OutcomeRow(
        job=outcome.job,
        attempt=outcome.attempt,
        head=outcome.head,
        state=_end(outcome),
        text=outcome.text,
        token_ids=outcome.token_ids,
        finish_reason=outcome.finish_reason,
        error_type=outcome.failure,
        error_message=outcome.failure_message,
        prompt_tokens=outcome.prompt_tokens,
        choices=tuple(ChoiceRow(item.text, item.token_ids, item.finish_reason) for item in outcome.choices),
        logprobs=_logprobs(outcome),
        **({name: getattr(metrics, name) for name in _FIGURES} if metrics else {}),
    )


def _logprobs(outcome: Outcome) -> str | None:
    """Those of every choice as JSON; None if there are none."""
    packed = [pack(outcome.logprobs), *(pack(choice.logprobs) for choice in outcome.choices)]
    return json.dumps(packed, separators=(",", ":")) if any(packed) else None


def _end(outcome: Outcome) -> JobState:
    if outcome.stopped is not None:
        return JobState(outcome.stopped.value)
    return JobState.COMPLETED if outcome.failure is None else JobState.FAILED
