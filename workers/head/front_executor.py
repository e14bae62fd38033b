"""The body of `shardq.generate` in a front: lease, engine, results stream; then Celery acknowledges."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import redis
from celery.exceptions import Ignore, Reject

from tasks import results
from tasks.connection import Outage
from tasks.generation import Attempt, FailureType, GenerationTask, Outcome, StopReason
from tasks.lease import Admission, LeaseState
from workers.head.background import Background
from workers.head.channel_client import EngineClient, EngineLost
from workers.head.channel_messages import Finished, HandedBack, Progress, Started
from workers.head.front_leases import Leases

logger = logging.getLogger(__name__)

#: seconds between two live events of one job
PROGRESS_S = 2.0
#: seconds between two attempts at a queue server that does not answer
RETRY_S = 2.0
#: tries from which on a job is suspected of having killed the engines before: it runs alone
SUSPECT_TRIES = 3


T = TypeVar("T")


class SendEvent(Protocol):
    """Sends a live event to Flower, without blocking."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class Executor:
    """Runs deliveries; one call of `run` per delivery and thread (`tasks.generate.GenerateExecutor`).

    An attempt over which more than `max_tries` engines were lost ends as failed, without an engine.
    """

    def __init__(
        self,
        engine: EngineClient,
        client: redis.Redis,
        leases: Leases,
        head_id: str,
        send_event: SendEvent,
        max_tries: int,
    ) -> None:
        self._engine = engine
        self._client = client
        self._leases = leases
        self._head_id = head_id
        self._send_event = send_event
        self._max_tries = max_tries
        self._records = Background("started-records")
        self._outage = Outage(logger, "jobs wait for it, nothing is lost")
        self._stopping = threading.Event()

    def run(self, request: Any, task: GenerationTask) -> dict[str, Any]:
        """See `GenerateExecutor.run`."""
        return self._end(request, task.task_id, lambda admission: self._outcome(task, admission))

    def refuse(self, request: Any, value: object, reason: str) -> dict[str, Any]:
        """See `GenerateExecutor.refuse`.

        What a later version wrote never comes here: this message is damaged, for every head. Handed back it would come
        again and again; a user's retry has it written anew.
        """
        attempt = Attempt.of(request.request.id)
        if attempt is None:
            logger.error("put aside a message that names no job: %s", reason)
            self._insist(lambda: results.put_aside(self._client, value))
            raise Reject(reason, requeue=False)
        return self._end(request, attempt.task_id, lambda admission: self._refusal(attempt, reason, admission))

    def _end(self, request: Any, task_id: str, outcome_for: Callable[[Admission], Outcome]) -> dict[str, Any]:
        """Under the attempt's lease, publish what `outcome_for` makes of it."""
        admission = self._insist(lambda: self._leases.admit(task_id))
        if admission.state is LeaseState.DONE:
            return {"finish": "already done"}
        if admission.state is LeaseState.TAKEN:
            raise Reject("this front stops", requeue=True)
        logger.info("job taken", extra={"task": task_id})
        handed_back = True
        try:
            outcome = outcome_for(admission)
            redelivered = bool((request.request.delivery_info or {}).get("redelivered"))
            self._insist(lambda: self._publish(outcome, redelivered))
            handed_back = False
        finally:
            if self._leases.leave(task_id) and handed_back:
                self._leases.release(task_id)
        if outcome.stopped is not None:
            self._show_revoked(outcome, outcome.stopped)
            raise Ignore
        if outcome.failure is not None:
            self._show_failed(outcome, outcome.failure)
            raise Ignore
        return summary(outcome)

    def stop(self) -> None:
        """Give up waiting for anything but the engine: what cannot go on is handed back."""
        self._stopping.set()
        self._leases.stop()

    def _outcome(self, task: GenerationTask, admission: Admission) -> Outcome:
        if admission.stopped is not None:
            return Outcome.unbegun(task, self._head_id, stopped=admission.stopped)
        if admission.tries > self._max_tries:
            message = f"{self._max_tries} engines were lost while they worked on this job; it is not tried again"
            logger.error("job %s: %s", task.job, message, extra={"job": task.job})
            return Outcome.unbegun(task, self._head_id, failure=FailureType.TOO_MANY_TRIES, message=message)
        return self._generate(task, suspect=admission.tries >= SUSPECT_TRIES)

    def _refusal(self, attempt: Attempt, reason: str, admission: Admission) -> Outcome:
        if admission.stopped is not None:
            return Outcome.unbegun(attempt, self._head_id, stopped=admission.stopped)
        message = f"this head cannot read the job: its message is damaged ({reason})"
        logger.error("job %s: %s", attempt.job, message, extra={"job": attempt.job})
        # a type of failure of its own would be unreadable to a host of another version
        return Outcome.unbegun(attempt, self._head_id, failure=FailureType.INTERNAL, message=message)

    def _generate(self, task: GenerationTask, *, suspect: bool) -> Outcome:
        """Have the engine do it; raises Reject if the engine hands it back or is lost."""
        generation = self._engine.submit(task, suspect=suspect)
        reported = time.monotonic()
        has_slot = False
        while True:
            match generation.next_event():
                case Started():
                    has_slot = True
                    self._record_started(task, time.time())
                case Progress(task_id, num_tokens, tps):
                    if time.monotonic() - reported >= PROGRESS_S:
                        reported = time.monotonic()
                        text = f"tps={_rate(tps)} tokens={num_tokens}"
                        self._send_event("task-progress", uuid=task_id, result=text)
                case Finished(_, outcome):
                    return outcome
                case HandedBack():
                    self._leases.give_up_try(task.task_id)
                    raise Reject("handed back", requeue=True)
                case EngineLost():
                    # a long prompt may have killed the engine already while it was tokenised
                    if not has_slot and not task.request.is_long:
                        self._leases.give_up_try(task.task_id)
                    raise Reject("engine lost", requeue=True)

    def _record_started(self, task: GenerationTask, at: float) -> None:
        self._records.do(lambda: results.publish_started(self._client, task, self._head_id, at))

    def _publish(self, outcome: Outcome, redelivered: bool) -> None:
        if redelivered and results.is_done(self._client, outcome.task_id):
            return  # the other delivery of this job was quicker
        results.publish_outcome(self._client, outcome)

    def _show_revoked(self, outcome: Outcome, reason: StopReason) -> None:
        """`Ignore` sends no event of its own: the dashboard would show the job as started for ever."""
        expired = reason is StopReason.EXPIRED
        fields = {"terminated": True, "signum": None, "expired": expired, "result": repr(summary(outcome))}
        self._send_event("task-revoked", uuid=outcome.task_id, **fields)

    def _show_failed(self, outcome: Outcome, failure: FailureType) -> None:
        """What Celery would send for an exception, which it would log with a traceback, too."""
        reason = f"{failure}: {outcome.failure_message}" if outcome.failure_message else str(failure)
        self._send_event("task-failed", uuid=outcome.task_id, exception=reason)

    def _insist(self, call: Callable[[], T]) -> T:
        """`call()`, again and again while the queue server fails us; Reject once this front stops."""
        while True:
            try:
                value = call()
            except redis.RedisError as error:
                self._outage.failed(error)
                if self._stopping.wait(RETRY_S):
                    raise Reject("queue server away", requeue=True) from error
            else:
                self._outage.over()
                return value


def summary(outcome: Outcome) -> dict[str, Any]:
    """What Flower shows of a finished job, its decode rate first."""
    tps = outcome.metrics.decode_tps if outcome.metrics else None
    finish = outcome.finish_reason or outcome.failure or outcome.stopped
    figures = {} if tps is None else {"tps": round(tps, 2)}
    return {**figures, "tokens": outcome.num_tokens, "finish": None if finish is None else str(finish)}


def _rate(tps: float | None) -> str:
    return "-" if tps is None else f"{tps:.1f}"
