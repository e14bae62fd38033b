"""A front: a small process (`python -m workers.head.front`) whose Celery consumer brings an engine jobs.

It takes messages from the queue of one served name while the engine lets it, has a thread per job waiting for
the engine, publishes outcomes and acknowledges. It holds no state worth keeping: killed at any moment, its
messages come again and join what the engine already works on. It ends with its engine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

import redis
from celery import bootsteps
from celery.app import trace
from celery.worker import state

from tasks import keys
from tasks.app import app, model_queue
from tasks.connection import connect
from tasks.generate import NAME
from tasks.logs import configure
from tasks.settings import TaskSettings
from workers.head.channel_client import EngineClient, EngineUnreachable
from workers.head.front_consumer import (
    EventPublisher,
    Gate,
    consumer_step,
    keep_refreshed,
    request_class,
)
from workers.head.front_executor import Executor
from workers.head.front_fetch import Taker, connection_class
from workers.head.front_leases import Leases
from workers.head.front_settings import FrontSettings
from workers.head.front_settlements import Settlements
from workers.head.fronts import END_S

logger = logging.getLogger(__name__)

#: connections to the queue server opened in advance: over a far link each costs several round trips
_WARM_CONNECTIONS = 3
#: Linux: `prctl` option that names the signal a process gets when its parent dies
_PR_SET_PDEATHSIG = 1


class Front:
    """One front's parts, joined around Celery's worker. Raises EngineUnreachable."""

    def __init__(self, settings: FrontSettings, tasks_settings: TaskSettings) -> None:
        head_id = tasks_settings.head_id or socket.gethostname()
        client = self._client = connect(tasks_settings)
        self._settings = settings
        self._gate = Gate(keys.queue(settings.model))
        self._events = EventPublisher()
        self._settlements = Settlements(client, head_id, self._gate.wake)
        self._taker = Taker(client, head_id, self._settlements, settings.reads)
        authkey = bytes.fromhex(settings.authkey.get_secret_value())
        self._engine = EngineClient(settings.address, authkey, self._gate.set_open, self._lose_engine)
        leases = Leases(client, head_id, settings.instance)
        self._executor = Executor(self._engine, client, leases, head_id, self._events.send, tasks_settings.max_tries)
        keep_refreshed(self._settlements)
        self._hostname = f"{head_id}-{settings.index}@{socket.gethostname()}"

    def run(self) -> None:
        """Serve until `end`, a signal or the engine's end."""
        threading.Thread(target=warm, args=(self._client,), name="warm", daemon=True).start()
        self._configure()
        trace.setup_worker_optimizations(app, self._hostname)
        worker = app.WorkController(
            pool="threads",
            concurrency=self._settings.concurrency,
            task_events=True,
            without_mingle=True,
            without_gossip=True,
            hostname=self._hostname,
        )
        worker.start()
        self._engine.close()

    def end(self) -> None:
        """Take no more messages and end; running jobs have the grace period. Safe in a signal handler."""
        state.should_stop = 0
        # not from here: a signal may have come while its thread held the loop's lock
        threading.Thread(target=self._gate.wake, daemon=True).start()
        # Celery may wait for a queue server that never comes back; what a front holds comes again by itself
        last_resort = threading.Timer(self._settings.grace_s + END_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()

    def begin_grace(self) -> None:
        """Hand back what still runs when the grace period is over."""
        timer = threading.Timer(self._settings.grace_s, self._hand_back)
        timer.daemon = True
        timer.start()

    def _configure(self) -> None:
        app.executor = self._executor
        app.amqp.Connection = connection_class(self._taker)
        app.conf.update(
            task_queues=[model_queue(self._settings.model)],
            # an outage may be long
            broker_connection_max_retries=None,
            # restoring the count hangs on Celery's own acknowledgements, which a front does not use
            worker_enable_prefetch_count_reduction=False,
        )
        app.tasks[NAME].Request = request_class(self._settlements)
        app.steps["worker"].add(grace_step(self))
        app.steps["consumer"].add(consumer_step(self._gate, self._events, self._settlements))

    def _hand_back(self) -> None:
        self._executor.stop()
        self._engine.hand_back()

    def _lose_engine(self) -> None:
        self._executor.stop()
        self.end()


def grace_step(front: Front) -> type[Any]:
    """The step that begins the grace period when Celery's worker stops, before it waits for its threads."""

    class GraceStep(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.components:Pool",)

        def start(self, worker: Any) -> None:
            pass

        def stop(self, worker: Any) -> None:
            front.begin_grace()

    return GraceStep


def warm(client: redis.Redis) -> None:
    """Open connections before the first job needs them."""
    pool = client.connection_pool
    try:
        connections = [pool.get_connection() for _ in range(_WARM_CONNECTIONS)]
    except redis.RedisError as error:
        logger.info("connections not opened in advance: %s", error)
        return
    for connection in connections:
        pool.release(connection)


def die_with(parent: int) -> None:
    """Get SIGTERM when the head dies. Elsewhere than on Linux the closing socket alone tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the head is gone")


def main() -> None:
    """Entry point of the process; everything it needs is in the environment."""
    settings = FrontSettings()  # type: ignore[call-arg]
    die_with(settings.parent)
    configure(settings.log_level, process=f"front-{settings.index}")
    try:
        front = Front(settings, TaskSettings())
    except EngineUnreachable as error:
        logger.error("%s", error)
        sys.exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: front.end())
    front.run()


if __name__ == "__main__":
    main()
