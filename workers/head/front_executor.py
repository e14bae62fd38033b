"""The body of `shardq.generate` in a front: lease, engine, results stream; then Celery acknowledges."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from celery.exceptions import Reject

from tasks import results
from tasks.generation import GenerationTask, Outcome
from tasks.lease import LeaseState
from workers.head.background import Background
from workers.head.channel_client import EngineClient
from workers.head.channel_messages import Finished, HandedBack, Progress, Started
from workers.head.front_leases import Leases

logger = logging.getLogger(__name__)

#: seconds between two live events of one job
PROGRESS_S = 2.0
#: seconds between two attempts at a queue server that does not answer
RETRY_S = 2.0

SendProgress = Callable[[str, str], None]


class Executor:
    """Runs deliveries; one call of `run` per delivery and thread (`tasks.generate.GenerateExecutor`).

    `send_progress(task_id, text)` sends a live event and must not block.
    """

    def __init__(
        self,
        engine: EngineClient,
        client: redis.Redis,
        leases: Leases,
        head_id: str,
        send_progress: SendProgress,
    ) -> None:
        self._engine = engine
        self._client = client
        self._leases = leases
        self._head_id = head_id
        self._send_progress = send_progress
        self._records = Background("started-records")
        self._stopping = threading.Event()

    def run(self, request: Any, task: GenerationTask) -> dict[str, Any]:
        """See `GenerateExecutor.run`."""
        task_id = task.task_id
        state = self._insist(lambda: self._leases.admit(task_id), task_id)
        if state is LeaseState.DONE:
            return {"tps": None, "finish": "already done"}
        if state is LeaseState.TAKEN:
            raise Reject("this front stops", requeue=True)
        handed_back = True
        try:
            outcome = self._generate(task)
            redelivered = bool((request.request.delivery_info or {}).get("redelivered"))
            self._insist(lambda: self._publish(outcome, task_id, redelivered), task_id)
            handed_back = False
        finally:
            if self._leases.leave(task_id) and handed_back:
                self._leases.release(task_id)
        return summary(outcome)

    def stop(self) -> None:
        """Give up waiting for anything but the engine: what cannot go on is handed back."""
        self._stopping.set()
        self._leases.stop()

    def _generate(self, task: GenerationTask) -> Outcome:
        """Have the engine do it; raises Reject if the engine hands it back."""
        generation = self._engine.submit(task)
        reported = time.monotonic()
        while True:
            match generation.next_event():
                case Started():
                    self._record_started(task, time.time())
                case Progress(task_id, num_tokens, tps):
                    if time.monotonic() - reported >= PROGRESS_S:
                        reported = time.monotonic()
                        self._send_progress(task_id, f"tps={_rate(tps)} tokens={num_tokens}")
                case Finished(_, outcome):
                    return outcome
                case HandedBack():
                    raise Reject("handed back", requeue=True)

    def _record_started(self, task: GenerationTask, at: float) -> None:
        self._records.do(lambda: results.publish_started(self._client, task, self._head_id, at))

    def _publish(self, outcome: Outcome, task_id: str, redelivered: bool) -> None:
        if redelivered and results.is_done(self._client, task_id):
            return  # the other delivery of this job was quicker
        results.publish_outcome(self._client, outcome)

    def _insist(self, call: Callable[[], Any], task_id: str) -> Any:
        """`call()`, again and again while the queue server does not answer; Reject once this front stops."""
        while True:
            try:
                return call()
            except redis.RedisError as error:
                logger.warning("queue server, job %s: %s; trying again", task_id, error)
                if self._stopping.wait(RETRY_S):
                    raise Reject("queue server away", requeue=True) from error


def summary(outcome: Outcome) -> dict[str, Any]:
    """What Flower shows of a finished job, its decode rate first."""
    tps = outcome.metrics.decode_tps if outcome.metrics else None
    finish = outcome.finish_reason or outcome.failure
    return {
        "tps": None if tps is None else round(tps, 2),
        "tokens": len(outcome.token_ids),
        "finish": None if finish is None else str(finish),
    }


def _rate(tps: float | None) -> str:
    return "-" if tps is None else f"{tps:.1f}"
