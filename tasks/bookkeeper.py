"""The one process that moves jobs between the database and the queue server.

It feeds waiting jobs, records finished ones, stops cancelled ones, finds lost ones, gives back what dead heads had
taken, and mirrors the served names. All of it is safe to repeat: it may be killed at any moment, and two of them would
only waste work. A lease on the queue server still keeps all but one idle.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import redis

from storage.database import Database
from storage.errors import StorageError
from storage.job_records import Fate
from tasks import keys, lease
from tasks.connection import connect, ping, translated
from tasks.errors import QueueFull, QueueUnreachable, TaskError
from tasks.feeder import Feeder
from tasks.heads import say_host
from tasks.kept_database import MARK_S, difference, is_new_here, publish
from tasks.publish import Publisher
from tasks.reconciler import COUNT_S, Reconciler, forget_done
from tasks.recorder import Recorder
from tasks.rejected import take_in
from tasks.restorer import Restorer
from tasks.results import ResultsReader
from tasks.served import mirror_models
from tasks.settings import BookkeeperSettings
from tasks.status import BookkeeperStatus
from tasks.stopper import Stopper
from tasks.tally import Tally

log = logging.getLogger(__name__)

#: milliseconds after which another bookkeeper may take over from a silent one
TENURE_MS = 8_000
#: seconds between two renewals of the tenure
TENURE_RENEWAL_S = 2.0
#: seconds between two rounds of each duty
FEED_S = 0.5
HEADS_S = 1.0
HOST_S = 30.0
STOPS_S = 1.0
MODELS_S = 2.0
UNHEARD_S = 30.0
#: milliseconds for which a turn waits for records
BLOCK_MS = 250
#: for the bookkeeper's database: it has other duties than to wait for a lock
BUSY_TIMEOUT_MS = 2_000
#: seconds to wait after a failure; doubles up to the second value
RETRY_S, MAX_RETRY_S = 1.0, 4.0


@dataclass(slots=True)
class Duty:
    """Something to do again and again."""

    name: str
    period_s: float
    work: Callable[[float], object]
    #: it does without: a database that fails does not hold it up
    without_database: bool = False
    due: float = float("-inf")


class Bookkeeper:
    """See the module. `clock` gives seconds of a steady clock."""

    def __init__(
        self,
        settings: BookkeeperSettings,
        database: Database,
        client: redis.Redis,
        publisher: Publisher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._clock = clock
        self._database = database
        self._identity = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._recorder = Recorder(database, ResultsReader(client))
        self._tenure_until = float("-inf")
        self._waits = False
        self._feeder = feeder = Feeder(database, client, publisher, settings)
        reconciler = Reconciler(database, client, publisher, settings.scan_interval_s)
        stopper = Stopper(database, client, lambda: self._clock())
        # Before anything is fed: whoever submits must know where the results will be.
        self._tell = Duty("tell which database is kept", MARK_S, lambda _: self._tell_database())
        self._duties = [
            self._tell,
            Duty("say which version this is", HOST_S, lambda _: say_host(client), without_database=True),
            Duty("look after heads", HEADS_S, Restorer(client).turn, without_database=True),
            Duty("mirror the served names", MODELS_S, lambda _: mirror_models(client, database)),
            Duty("tell which heads jobs wait for", UNHEARD_S, lambda _: feeder.tell_who_waits()),
            Duty("stop jobs", STOPS_S, lambda _: stopper.turn()),
            Duty("feed", FEED_S, lambda _: feeder.turn()),
            Duty("look for lost jobs", min(COUNT_S, settings.scan_interval_s), reconciler.turn),
        ]

    def run(self, stop: threading.Event) -> None:
        """Turn until `stop` is set. Failures are logged and tried again, however long they last."""
        retry_s = RETRY_S
        failing = False
        while not stop.is_set():
            try:
                self.turn(stop)
            except StorageError as error:
                retry_s = RETRY_S  # the duties that do without the database must not wait longer
                log.error("%s; trying again in %.0f s", error, retry_s)
            except TaskError as error:
                log.error("%s; trying again in %.0f s", error, retry_s)
            except Exception:
                log.exception("the bookkeeper failed; trying again in %.0f s", retry_s)
            else:
                if failing:
                    log.warning("the bookkeeper works again")
                failing, retry_s = False, RETRY_S
                continue
            failing = True
            stop.wait(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def turn(self, stop: threading.Event, block_ms: int = BLOCK_MS) -> None:
        """Record what waits, then do what is due. Without the tenure, only wait for it.

        What fails is due again one period later. A database that fails keeps no duty back that can do without, and is
        waited for once a turn; a queue server that is full keeps none back that makes room. Raises QueueUnreachable or
        QueueRefused, or the first StorageError or QueueFull when the turn is over.
        """
        failures: list[Exception] = []
        with translated():
            if not self._holds_tenure():
                stop.wait(1.0)
                return
        _attempt(lambda: self._recorder.record(block_ms), failures)
        for duty in self._duties:
            now = self._clock()
            held_up = any(isinstance(failure, StorageError) for failure in failures) and not duty.without_database
            if now >= duty.due and not held_up and not stop.is_set():
                duty.due = now + duty.period_s
                _attempt(partial(duty.work, now), failures)
        if failures:
            raise failures[0]

    @property
    def tally(self) -> Tally:
        """What was recorded since this bookkeeper was made."""
        return self._recorder.tally

    def status(self) -> BookkeeperStatus:
        """What it does now; from any thread."""
        return BookkeeperStatus(active=self._tenure_until > float("-inf"), feeder_paused=self._feeder.paused)

    def close(self) -> None:
        """Let another bookkeeper take over at once."""
        with translated():
            lease.give_back(self._client, keys.BOOKKEEPER, self._identity)

    def _holds_tenure(self) -> bool:
        now = self._clock()
        if now < self._tenure_until:
            return True
        state = lease.take(self._client, keys.BOOKKEEPER, self._identity, TENURE_MS)
        holds = state is lease.LeaseState.HELD
        if not holds and not self._waits:
            self._say_who_is_at_work()
        if holds and self._waits:
            log.warning("this bookkeeper takes over")
        if holds and self._tenure_until == float("-inf"):
            self._tell.due = float("-inf")
        self._waits = not holds
        self._tenure_until = now + TENURE_RENEWAL_S if holds else float("-inf")
        return holds

    def _tell_database(self) -> None:
        if is_new_here(self._client, self._database):
            self._settle_in()
        publish(self._client, self._database)

    def _settle_in(self) -> None:
        """While another database was kept, or a later state of this one, outcomes of its jobs may have gone there."""
        taken = take_in(self._client, self._database)[Fate.APPLIED]
        if taken:
            log.warning("recorded %d outcomes that had been put aside", taken)
        number = forget_done(self._client, self._database)
        if number:
            log.warning("%d jobs are under way in this database: those that no head has are queued again", number)

    def _say_who_is_at_work(self) -> None:
        if other := difference(self._client, self._database):
            log.error("another bookkeeper is at work, with another database: %s; this one waits until it stops", other)
        else:
            log.warning("another bookkeeper is at work; this one waits until it stops")


def _attempt(work: Callable[[], object], failures: list[Exception]) -> None:
    try:
        with translated():
            work()
    except (StorageError, QueueFull) as error:
        failures.append(error)


def run(database: Database, settings: BookkeeperSettings, stop: threading.Event) -> None:
    """Keep books until `stop` is set.

    Waits for a queue server that does not answer. Raises QueueRefused for one that will not let us in, and
    MetricsRefused if `/metrics` cannot be served where the settings say.
    """
    client = connect(settings)
    try:
        ping(client)
    except QueueUnreachable as error:
        log.error("%s", error)
    with Publisher(settings) as publisher:
        bookkeeper = Bookkeeper(settings, database, client, publisher)
        with _metrics(settings, database, bookkeeper):
            log.info("bookkeeper started with database %s", database.place)
            bookkeeper.run(stop)
            _close(bookkeeper)
    client.close()


def _metrics(
    settings: BookkeeperSettings, database: Database, bookkeeper: Bookkeeper
) -> AbstractContextManager[object]:
    if settings.metrics_port is None:
        return nullcontext()
    from tasks.metrics_server import served_metrics  # with it comes an HTTP server that few need

    return served_metrics(settings, settings.metrics_port, database, bookkeeper.tally, bookkeeper.status)


def _close(bookkeeper: Bookkeeper) -> None:
    try:
        bookkeeper.close()
    except TaskError as error:
        log.warning("another bookkeeper can start in %d s: %s", TENURE_MS // 1000, error)
