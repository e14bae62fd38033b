"""A front's admission leases: taken before a job goes to the engine, renewed while it runs."""

from __future__ import annotations

import logging
import threading
import time

import redis

from tasks import lease
from tasks.connection import Outage
from tasks.lease import LEASE_MS, Admission, LeaseState

logger = logging.getLogger(__name__)

#: seconds between two looks at a lease that another head holds
POLL_S = 1.0
#: seconds between two renewals of all held leases
RENEW_S = LEASE_MS / 4 / 1000


class Leases:
    """The leases of the jobs this front works on. Thread-safe; renewed by a daemon thread.

    `instance` names the engine process: what it is given counts as its try.
    """

    def __init__(self, client: redis.Redis, head_id: str, instance: str, *, poll_s: float = POLL_S) -> None:
        self._client = client
        self._head_id = head_id
        self._instance = instance
        self._poll_s = poll_s
        self._lock = threading.Lock()
        #: deliveries of this front per task id
        self._held: dict[str, int] = {}
        self._stopping = threading.Event()
        threading.Thread(target=self._renew, name="lease-renew", daemon=True).start()

    def admit(self, task_id: str) -> Admission:
        """Wait while another head works on this job.

        HELD: go ahead, and `leave` afterwards. DONE: its outcome is published. TAKEN: this front stops and
        another head still has the job.
        """
        while True:
            admission = lease.acquire(self._client, task_id, self._head_id, self._instance)
            if admission.state is LeaseState.HELD:
                with self._lock:
                    self._held[task_id] = self._held.get(task_id, 0) + 1
            if admission.state is not LeaseState.TAKEN or self._stopping.wait(self._poll_s):
                return admission

    def leave(self, task_id: str) -> bool:
        """A delivery ended; True if it was this front's last one of the task."""
        with self._lock:
            self._held[task_id] -= 1
            last = not self._held[task_id]
            if last:
                del self._held[task_id]
            return last

    def release(self, task_id: str) -> None:
        """Let other heads have a job that was handed back; failing that the lease lapses by itself."""
        try:
            lease.release(self._client, task_id, self._head_id)
        except redis.RedisError as error:
            logger.info("lease of %s not released: %s", task_id, error)

    def give_up_try(self, task_id: str) -> None:
        """The engine was given this job and did nothing for it: that does not count."""
        try:
            lease.give_up_try(self._client, task_id, self._instance)
        except redis.RedisError as error:
            logger.info("a try of %s counts although it was none: %s", task_id, error)

    def stop(self) -> None:
        """Stop waiting for other heads' jobs."""
        self._stopping.set()

    def _renew(self) -> None:
        outage = Outage(logger, "leases are not renewed: other heads may begin the same jobs")
        while True:
            # held leases are renewed until the process ends: jobs may run on during the grace period
            time.sleep(RENEW_S)
            with self._lock:
                held = list(self._held)
            try:
                states = lease.renew(self._client, held, self._head_id)
            except redis.RedisError as error:
                outage.failed(error)
                continue
            outage.over()
            for task_id in (t for t, state in states.items() if state is LeaseState.TAKEN):
                logger.warning("another head may work on %s too: its lease had lapsed", task_id)
