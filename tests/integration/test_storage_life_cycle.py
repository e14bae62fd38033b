"""Whatever happens in whatever order, jobs and batches stay inside their state machine."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import text

from storage.batch_records import BatchRow, NewBatch
from storage.batches import add_jobs, begin_submission, list_batches, publish_batch
from storage.database import Database
from storage.errors import BatchEnded, BatchOpen
from storage.job_records import ClaimedJob, Fate, InFlightJob, NewJob, OutcomeRow, RunningJob
from storage.jobs import claim_waiting, mark_running, queued_or_running, reclaim, unclaim
from storage.outcomes import record_outcomes
from storage.retention import delete_batch
from storage.retries import RetryChoice, retry_batch
from storage.reuse import reuse_results
from storage.served_models import upsert_model
from storage.states import (
    BATCH_TRANSITIONS,
    IN_FLIGHT_STATES,
    JOB_TRANSITIONS,
    OPEN_STATES,
    RETRYABLE_STATES,
    STOP_ENDS,
    TERMINAL_STATES,
    TERMINAL_STATUSES,
    BatchStatus,
    JobState,
)
from storage.stops import cancel_batch, cancel_job, expire_due, pending_stops, settle_stops

#: the database itself notes every change of a state, whichever statement made it
_WITNESS = (
    "CREATE TABLE job_move (id, before, after, old_attempt, new_attempt)",
    "CREATE TABLE batch_move (id, before, after)",
    "CREATE TRIGGER job_moves AFTER UPDATE ON job WHEN old.state != new.state OR old.attempt != new.attempt BEGIN "
    "INSERT INTO job_move VALUES (old.id, old.state, new.state, old.attempt, new.attempt); END",
    "CREATE TRIGGER batch_moves AFTER UPDATE ON batch WHEN old.status != new.status BEGIN "
    "INSERT INTO batch_move VALUES (old.id, old.status, new.status); END",
)

Row = TypeVar("Row")

NUMBERS = st.integers(0, 10**6)
OUTCOMES = st.sampled_from(sorted(TERMINAL_STATES))
DEADLINES = st.one_of(st.none(), st.integers(1, 40).map(float))


class LifeCycle(RuleBasedStateMachine):
    """Feeders, heads, users and clocks, all at once."""

    @initialize()
    def open(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="shardq-life-"))
        self.now = 1000.0
        self.database = Database.open(f"sqlite:///{self.directory / 'x.sqlite3'}", clock=lambda: self.now)
        with self.database.write() as connection:
            for statement in _WITNESS:
                connection.execute(text(statement))
        upsert_model(self.database, "m", {"dtype": "float32"})
        self.claimed: list[ClaimedJob] = []
        self.seen: list[InFlightJob] = []
        self.ends: Counter[tuple[str, int]] = Counter()

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.end_everything()
            self.database.close()
            shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 5), window=DEADLINES, own=DEADLINES, greedy=st.booleans(), reuse=st.booleans())
    def submit(self, count: int, window: float | None, own: float | None, greedy: bool, reuse: bool) -> None:
        submission = begin_submission(
            self.database, NewBatch("hash", expires_at=None if window is None else self.now + window)
        )
        deadline = None if own is None else self.now + own
        request = '{"prompt":"p","temperature":0.0}' if greedy else '{"prompt":"p","seed":%d}'
        jobs = [
            NewJob(n, f"id-{n}", "m", "u", request if greedy else request % n, deadline if n % 2 else None)
            for n in range(1, count + 1)
        ]
        add_jobs(self.database, submission, jobs)
        if reuse:
            reuse_results(self.database, submission)
        publish_batch(self.database, submission)

    @rule(max_jobs=st.integers(1, 6))
    def claim(self, max_jobs: int) -> None:
        claimed = claim_waiting(self.database, "m", max_jobs=max_jobs, max_bytes=10**6)
        statuses = {batch.id: batch.status for batch in self.batches()}
        assert all(statuses[item.batch_id] is BatchStatus.IN_PROGRESS for item in claimed)
        self.claimed += claimed

    @precondition(lambda self: self.claimed)
    @rule(number=NUMBERS)
    def fail_to_publish(self, number: int) -> None:
        unclaim(self.database, self.claimed[number % len(self.claimed) :])

    @precondition(lambda self: self.claimed)
    @rule(number=NUMBERS)
    def start(self, number: int) -> None:
        item = self.claimed[number % len(self.claimed)]
        mark_running(self.database, [RunningJob(item.id, item.attempt, f"h{number % 2}")])

    @precondition(lambda self: self.claimed)
    @rule(number=NUMBERS, state=OUTCOMES, times=st.integers(1, 2))
    def record(self, number: int, state: JobState, times: int) -> None:
        """Of any attempt that ever was, as late as you like."""
        item = self.claimed[number % len(self.claimed)]
        before = {job.id: job for job in self.jobs()}.get(item.id)
        outcome = OutcomeRow(item.id, item.attempt, "h", state, text="text", token_ids=(1,))
        recorded = record_outcomes(self.database, [outcome] * times)
        is_first = before is not None and before.attempt == item.attempt and before.state in OPEN_STATES
        assert recorded.count(Fate.APPLIED) == int(is_first)
        assert len(recorded.fates) == times

    @rule(number=NUMBERS)
    def cancel_a_batch(self, number: int) -> None:
        for batch in self.one_of(self.batches(), number):
            try:
                cancel_batch(self.database, batch.id)
            except BatchEnded:
                assert batch.status in TERMINAL_STATUSES

    @rule(number=NUMBERS)
    def cancel_a_job(self, number: int) -> None:
        for job in self.one_of(self.jobs(), number):
            try:
                cancel_job(self.database, job.id)
            except BatchEnded:
                assert job.state in TERMINAL_STATES

    @rule(seconds=st.integers(1, 20))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        expire_due(self.database)
        assert expire_due(self.database).ended == 0

    @rule()
    def look_for_lost_jobs(self) -> None:
        self.seen = queued_or_running(self.database, "m")

    @precondition(lambda self: self.seen)
    @rule()
    def queue_lost_jobs_again(self) -> None:
        self.now += 1
        self.claimed += reclaim(self.database, self.seen)

    @rule(number=NUMBERS)
    def settle(self, number: int) -> None:
        stops = pending_stops(self.database)
        if stops:
            settle_stops(self.database, stops[: 1 + number % len(stops)])

    @rule(number=NUMBERS, states=st.sets(st.sampled_from(sorted(RETRYABLE_STATES)), min_size=1), window=DEADLINES)
    def retry(self, number: int, states: set[JobState], window: float | None) -> None:
        for batch in self.one_of(self.batches(), number):
            wanted = [job for job in self.jobs() if job.batch_id == batch.id and job.state in states]
            try:
                expires_at = None if window is None else self.now + window
                retried = retry_batch(self.database, batch.id, RetryChoice.of(*states), expires_at=expires_at)
            except BatchOpen:
                assert batch.status not in TERMINAL_STATUSES
            else:
                assert retried == len(wanted)

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        for batch in self.one_of(self.batches(), number):
            try:
                delete_batch(self.database, batch.id)
            except BatchOpen:
                assert batch.status not in TERMINAL_STATUSES

    @invariant()
    def every_move_is_allowed(self) -> None:
        if not hasattr(self, "database"):
            return
        jobs, batches = self.moves()
        for job_id, before, after, old_attempt, new_attempt in jobs:
            assert JobState(after) in JOB_TRANSITIONS[JobState(before)]
            is_retry = before in TERMINAL_STATES
            assert new_attempt == old_attempt + int(is_retry)
            self.ends[job_id, new_attempt] += after in TERMINAL_STATES
        for _, before, after in batches:
            assert BatchStatus(after) in BATCH_TRANSITIONS[BatchStatus(before)]
        assert set(self.ends.values()) <= {0, 1}

    @invariant()
    def every_batch_follows_its_jobs(self) -> None:
        if not hasattr(self, "database"):
            return
        jobs = self.jobs()
        for batch in self.batches():
            assert (batch.status in TERMINAL_STATUSES) == (batch.counts.num_open == 0)
            assert (batch.ended_at is not None) == (batch.status in TERMINAL_STATUSES)
            if batch.status is BatchStatus.EXPIRED:
                assert batch.counts.expired
            if batch.status is BatchStatus.CANCELLING:
                open_jobs = [job for job in jobs if job.batch_id == batch.id and job.state in OPEN_STATES]
                assert all(job.state in IN_FLIGHT_STATES and job.stop_reason for job in open_jobs)
        for job in jobs:
            assert not (job.state == JobState.WAITING and job.stop_reason)
            assert job.state not in STOP_ENDS.values() or (job.stop_reason and job.error_type)
            assert (job.recorded_at is not None) == (job.state in TERMINAL_STATES)

    def end_everything(self) -> None:
        """With nothing more to happen, every job and every batch comes to its end."""
        while claimed := claim_waiting(self.database, "m", max_jobs=99, max_bytes=10**6):
            self.claimed += claimed
        in_flight = queued_or_running(self.database, "m")
        record_outcomes(self.database, [OutcomeRow(job.id, job.attempt, "h", JobState.COMPLETED) for job in in_flight])
        self.every_move_is_allowed()
        self.every_batch_follows_its_jobs()
        assert all(batch.status in TERMINAL_STATUSES for batch in self.batches())
        assert all(self.ends[job.id, job.attempt] == 1 for job in self.jobs())

    def batches(self) -> list[BatchRow]:
        return list_batches(self.database, limit=1000)

    def jobs(self) -> list[Any]:
        """All jobs; the columns as they are stored."""
        query = (
            "SELECT id, batch_id, state, attempt, stop_reason, error_type, recorded_at FROM job ORDER BY batch_id, line"
        )
        with self.database.read() as connection:
            return list(connection.execute(text(query)).all())

    def moves(self) -> tuple[list[Any], list[Any]]:
        """What the witnesses noted since they were last asked."""
        with self.database.write() as connection:
            jobs = list(connection.execute(text("SELECT * FROM job_move ORDER BY rowid")).all())
            batches = list(connection.execute(text("SELECT * FROM batch_move ORDER BY rowid")).all())
            connection.execute(text("DELETE FROM job_move"))
            connection.execute(text("DELETE FROM batch_move"))
        return jobs, batches

    @staticmethod
    def one_of(items: list[Row], number: int) -> list[Row]:
        return [items[number % len(items)]] if items else []


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
