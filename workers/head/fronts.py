"""The head's front processes: started, started again when they die, and ended together."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.logs import level_name
from workers.head.front_settings import PREFIX
from workers.settings import HeadSettings

logger = logging.getLogger(__name__)

#: seconds before a dead front is started again: doubled up to the last, reset by a good run
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 4.0
GOOD_RUN_S = 60.0
#: seconds between two looks at the processes
_WATCH_S = 0.2
#: seconds after the grace period within which a front must have ended
END_S = 5.0


#: what Python is told to run one; `-P`: whatever the working folder holds
FRONT = ("-P", "-m", "workers.head.front")


def ours_first(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which our packages, whose names are plain, are found before others of the same names."""
    path = filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


@dataclass(slots=True)
class _Front:
    index: int
    concurrency: int
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    due: float = field(default_factory=time.monotonic)


class Fronts:
    """`count` front processes that together take up to `concurrency_total` jobs.

    They connect to the engine at `address` and start paused. A thread watches over them until `close`.
    """

    def __init__(
        self,
        settings: HeadSettings,
        address: str,
        authkey: bytes,
        *,
        model: str,
        count: int,
        concurrency_total: int,
        grace_s: float = 10.0,
        reads: int = 1,
    ) -> None:
        """`reads`: highest version of the tasks that they take."""
        self._environment = {
            **ours_first(os.environ),
            "SHARDQ_BROKER_URL": settings.broker_url,
            "SHARDQ_HEAD_ID": settings.head_id,
            "SHARDQ_ALLOW_INSECURE": str(settings.allow_insecure),
            f"{PREFIX}ADDRESS": address,
            f"{PREFIX}AUTHKEY": authkey.hex(),
            f"{PREFIX}INSTANCE": uuid.uuid4().hex,
            f"{PREFIX}MODEL": model,
            f"{PREFIX}READS": str(reads),
            f"{PREFIX}PARENT": str(os.getpid()),
            f"{PREFIX}GRACE_S": str(grace_s),
            f"{PREFIX}LOG_LEVEL": level_name(),
        }
        self._grace_s = grace_s
        shares = spread(concurrency_total, count)
        self._fronts = [_Front(index, share) for index, share in enumerate(shares)]
        self._closing = threading.Event()
        # one thread starts every front: on Linux they get their signal when the *thread* that made them ends
        self._watcher = threading.Thread(target=self._watch, name="fronts", daemon=True)
        self._watcher.start()

    def pids(self) -> list[int]:
        """Process ids of the fronts that run now."""
        processes = [front.process for front in self._fronts]
        return [process.pid for process in processes if process is not None and process.poll() is None]

    def close(self) -> None:
        """End every front: jobs may finish within the grace period, the rest goes back to the queue."""
        self._closing.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_S):
            for front in self._fronts:
                self._look_after(front)
        self._end()

    def _look_after(self, front: _Front) -> None:
        now = time.monotonic()
        if front.process is not None and front.process.poll() is not None:
            good = now - front.started >= GOOD_RUN_S
            front.backoff_s = FIRST_BACKOFF_S if good else min(2 * front.backoff_s, LAST_BACKOFF_S)
            front.due = now + front.backoff_s
            logger.warning(
                "front %d ended with status %s; starting it again in %g s",
                front.index,
                front.process.returncode,
                front.backoff_s,
            )
            front.process = None
        if front.process is None and now >= front.due:
            front.process = self._start(front)
            front.started = now

    def _start(self, front: _Front) -> subprocess.Popen[bytes]:
        own = {f"{PREFIX}INDEX": str(front.index), f"{PREFIX}CONCURRENCY": str(front.concurrency)}
        return subprocess.Popen(
            [sys.executable, *FRONT],
            env={**self._environment, **own},
            stdin=subprocess.DEVNULL,
            # a Ctrl-C in the head's terminal is the head's to handle
            start_new_session=True,
        )

    def _end(self) -> None:
        processes = [front.process for front in self._fronts if front.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + self._grace_s + END_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("front process %d does not end; killed", process.pid)
                process.kill()
                process.wait()


def spread(total: int, count: int) -> list[int]:
    """`total` jobs over at most `count` fronts, at least one each, as evenly as possible."""
    count = max(1, min(count, total))
    return [total // count + (index < total % count) for index in range(count)]


def concurrency(slots: int) -> int:
    """Jobs a head takes in all: its slots and a reserve that waits, so that a free slot is filled at once."""
    return slots + max(2, slots // 4)
