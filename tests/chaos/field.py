"""The system under test: real processes, every connection over a link that can be broken, a supervisor."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from benchmarks.link_simulator import LinkShape, LinkSimulator
from cli.processes import Child
from relay.embedded import EmbeddedRedis
from relay.errors import EmbeddedRedisFailed
from tests.acceptance.system import System
from tests.chaos import proc

log = logging.getLogger(__name__)

#: seconds before an ended process is started again, as systemd's RestartSec
RESTART_S = 1.0
#: seconds between two scans for lost jobs; in real life 30
SCAN_INTERVAL_S = 5.0
#: the variable that marks every process of one campaign
MARK = "SHARDQ_CHAOS"
#: fronts of a head
NUM_FRONTS = 2
#: seconds a head gives running jobs on SIGTERM
GRACE_S = 2.0
#: a process that lived this long and ends unasked has a fault of its own
STABLE_S = 5.0

#: seconds for which a restarted server's port may be in use
_PORT_PATIENCE_S = 10.0

BOOKKEEPER = "bookkeeper"


@dataclass(frozen=True, slots=True)
class Death:
    """A process ended."""

    at: float
    child: str
    status: int
    #: seconds it had lived
    lived_s: float
    #: a fault did it, or asked for it
    wanted: bool
    last_line: str


class Field(System):
    """As `System`, with several heads and one tail more than heads; what ends is started again.

    `links` are by (process, "queue" | "wire"). The CLI talks to the servers directly.
    """

    def __init__(self, directory: Path, model: Path | str, *, num_heads: int, link: LinkShape) -> None:
        super().__init__(directory, model)
        self.heads_names = [f"head-{number + 1}" for number in range(num_heads)]
        self.tails_names = [f"tail-{number + 1}" for number in range(num_heads + 1)]
        self.links: dict[tuple[str, str], LinkSimulator] = {}
        self.link_shape = link
        self.token = secrets.token_hex(8)
        self.temporary = directory / "tmp"
        self.log_file = directory / "processes.log"
        self.deaths: list[Death] = []
        #: Unix time of each process' latest start
        self.started_at: dict[str, float] = {}
        #: lines by which the bookkeeper told of a lost job
        self.num_requeued = 0
        self._lock = threading.RLock()
        self._wanted_deaths: set[str] = set()
        self._held: set[str] = set()
        self._due: dict[str, float] = {}
        self._ending = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self.temporary.mkdir(parents=True)
        super().__enter__()
        try:
            self._open_links()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        super().__exit__(kind, error, trace)

    def _open_links(self) -> None:
        for head in self.heads_names:
            self._open_link(head, "queue", self.queue)
            self._open_link(head, "wire", self.wire)
        for tail in self.tails_names:
            self._open_link(tail, "wire", self.wire)
        self._open_link(BOOKKEEPER, "queue", self.queue)

    def _open_link(self, child: str, role: str, server: EmbeddedRedis) -> None:
        # the bookkeeper is on the servers' host
        shape = LinkShape() if child == BOOKKEEPER else self.link_shape
        link = LinkSimulator("127.0.0.1", urlsplit(server.url).port or 0, shape)
        self.links[child, role] = self._cleanup.enter_context(link)

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "TMPDIR": str(self.temporary), MARK: self.token}

    def hear(self, child: str, line: str) -> None:
        super().hear(child, line)
        if "was lost and is queued again" in line:
            self.num_requeued += 1
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(f"{time.time():.3f} {child:>10} | {line}\n")

    # -- processes --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[str]:
        """Every process that the supervisor keeps up, in the order of their start."""
        return [BOOKKEEPER, *self.tails_names, *self.heads_names]

    @property
    def expected(self) -> list[str]:
        """Those that should be up now: none that a fault keeps away."""
        with self._lock:
            return [name for name in self.workers if name not in self._held]

    def start_workers(self) -> None:
        """Start everything, and the supervisor."""
        for name in self.workers:
            self.spawn(name)
        self._supervisor.start()

    def spawn(self, name: str) -> Child:
        """Start one of the processes by its name."""
        if name in self.heads_names:
            options = {"slots": 8, "fronts": NUM_FRONTS, "grace_s": GRACE_S, "max_lanes": 2}
            return self.start_head(name, **options)
        if name in self.tails_names:
            return self.start_tail(name, tail_name=name)
        return self.start(BOOKKEEPER, "bookkeeper", SHARDQ_SCAN_INTERVAL_S=str(SCAN_INTERVAL_S))

    def start(self, child: str, *arguments: str, **environment: str) -> Child:
        with self._lock:
            self.started_at[child] = time.time()
            return super().start(child, *arguments, **{**self._link_urls(child), **environment})

    def _link_urls(self, child: str) -> dict[str, str]:
        ways = {
            "SHARDQ_BROKER_URL": (self.links.get((child, "queue")), self.queue.url),
            "SHARDQ_RELAY_URL": (self.links.get((child, "wire")), self.wire.url),
        }
        return {name: link.url_for(url) for name, (link, url) in ways.items() if link is not None}

    def living(self, name: str) -> int | None:
        """The process id of a living process."""
        with self._lock:
            if name not in self._processes or self._processes[name].returncode is not None:
                return None
            return self._processes[name].process.pid

    def fronts(self, head: str) -> list[int]:
        """Process ids of a head's fronts."""
        pid = self.living(head)
        return proc.children(pid) if pid is not None else []

    def end(self, name: str, number: signal.Signals, timeout_s: float = 40.0) -> None:
        """Signal a process to its end and wait for that; the supervisor starts it again."""
        with self._lock:
            process = self._processes[name].process
            self._wanted_deaths.add(name)
        process.send_signal(number)
        process.wait(timeout_s)

    def hold(self, name: str) -> None:
        """Do not start this process again before `release`."""
        with self._lock:
            self._held.add(name)

    def release(self) -> None:
        """Start again what was held."""
        with self._lock:
            self._held.clear()

    def _supervise(self) -> None:
        while not self._ending.wait(0.1):
            with self._lock:
                for name in self.workers:
                    if name in self._processes and self._processes[name].returncode is not None:
                        self._bury(self._processes[name])
                now = time.monotonic()
                for name in [name for name, due in self._due.items() if now >= due and name not in self._held]:
                    del self._due[name]
                    self.spawn(name)

    def _bury(self, child: Child) -> None:
        self._processes.forget(child.name)
        lived_s = time.monotonic() - child.started
        wanted = child.name in self._wanted_deaths
        self._wanted_deaths.discard(child.name)
        last = child.lines[-1] if child.lines else ""
        self.deaths.append(Death(time.time(), child.name, child.process.wait(), lived_s, wanted, last))
        self._due[child.name] = time.monotonic() + RESTART_S

    # -- links and servers -------------------------------------------------------------------------------------

    def shape_links(self, shape: LinkShape) -> None:
        """What every link is like from now on, but the bookkeeper's: it is on the servers' host."""
        self.link_shape = shape
        for (child, _), link in self.links.items():
            if child != BOOKKEEPER:
                link.reshape(shape)

    def restart(self, server: EmbeddedRedis, away_s: float, *, kill: bool) -> None:
        """End a server, in order or by kill -9, and start it again on the same port with what it kept."""
        if kill:
            signal_process(server.pid, signal.SIGKILL)
        server.stop()
        time.sleep(away_s)
        deadline = time.monotonic() + _PORT_PATIENCE_S
        while not server.is_alive():
            try:
                server.start()
            except EmbeddedRedisFailed:
                # a connection that was just made from here may stand on the port for a moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False if it has just ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal these processes."""
    for pid in pids:
        signal_process(pid, number)
