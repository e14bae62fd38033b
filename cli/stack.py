"""Everything on one machine: two embedded Redis servers, bookkeeper, tail, head and, on request, Flower."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from cli.errors import StackFailed
from cli.processes import Child, LineSink, Processes, explanation, shardq_argv
from cli.settings import Addresses, RunningStack
from relay.embedded import EmbeddedRedis
from storage.addresses import sqlite_url
from tasks.connection import connect, translated
from tasks.heads import HeadInfo, live_heads
from tasks.settings import TaskSettings

#: head first: it hands its jobs back and frees the tail; the bookkeeper then records what is left
STOP_ORDER = ("flower", "head", "tail", "bookkeeper")
#: seconds from the start of head and tail until jobs can run
READY_TIMEOUT_S = 600.0
#: a child that ends sooner than this has ended early
STABLE_S = 20.0
#: ends in a row that may be early: more than the tries of a job over which engines die, so that it ends before we do
MOST_EARLY_ENDS = 10
#: head and tail share the cores: a thread that waits must not spin on one that the other needs
SHARED_CORES = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
#: seconds before an ended child is started again
RESTART_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What runs, and how. Options left out of `head` and `tail` come from the environment or the defaults."""

    #: directory, hub id or GGUF file
    model: str
    #: arguments of `shardq head` and `shardq tail` beside the model
    head: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    #: port of the dashboard; None starts none
    flower_port: int | None = None
    #: port of the bookkeeper's `/metrics`; None: as the environment says
    metrics_port: int | None = None
    #: whether queue and database survive a restart
    persistent: bool = True
    #: environment of every child
    environment: dict[str, str] = field(default_factory=dict)


class Stack:
    """A context manager: entering starts the processes, leaving stops them in order."""

    def __init__(self, data_dir: Path, options: StackOptions, sink: LineSink) -> None:
        self._data_dir = data_dir
        self._options = options
        self._cleanup = ExitStack()
        self._processes = Processes(sink)
        self._argv: dict[str, list[str]] = {}
        self._addresses: Addresses | None = None
        self._early_ends: Counter[str] = Counter()

    @property
    def addresses(self) -> Addresses:
        """Where the services listen, once entered."""
        if self._addresses is None:
            raise StackFailed("the stack is not running")
        return self._addresses

    def __enter__(self) -> Stack:
        with self._cleanup:
            self._cleanup.enter_context(_only_one(self._data_dir))
            if not self._options.persistent:
                self._forget_earlier_runs()
            self._addresses = self._start_servers()
            note = RunningStack(self._data_dir)
            note.write(self._addresses)
            self._cleanup.callback(note.remove)
            self._cleanup.callback(self._processes.stop, STOP_ORDER)
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def _forget_earlier_runs(self) -> None:
        """Jobs of a run that was killed would be taken up again."""
        for path in self._data_dir.glob("shardq.sqlite3*"):
            path.unlink(missing_ok=True)

    def _start_servers(self) -> Addresses:
        queue = EmbeddedRedis(self._data_dir / "queue", persistent=self._options.persistent)
        wire = EmbeddedRedis(self._data_dir / "wire", persistent=False)
        broker_url = self._cleanup.enter_context(queue).url
        relay_url = self._cleanup.enter_context(wire).url
        return Addresses(broker_url, relay_url, sqlite_url(self._data_dir / "shardq.sqlite3"))

    def prepare_model(self, on_wait: Callable[[], None]) -> None:
        """Download or convert the model if need be, before head and tail both ask for it."""
        if Path(self._options.model).expanduser().is_dir():
            return  # nothing to fetch or convert; the workers say what is wrong with it
        prepared = _Prepared(self._data_dir / "prepared.json", self._options.model)
        if prepared.is_known():
            return
        child = self._start("model", "models", "prepare", self._options.model)
        while child.returncode is None:
            on_wait()
            time.sleep(0.1)
        child.reader.join(timeout=2)
        self._processes.forget("model")
        if child.returncode != 0:
            raise StackFailed(explanation(child.lines))
        prepared.remember(child.lines[-1] if child.lines else "")

    def start_workers(self) -> None:
        """Start bookkeeper, tail, head and Flower."""
        metrics = () if self._options.metrics_port is None else ("--metrics-port", str(self._options.metrics_port))
        self._start("bookkeeper", "bookkeeper", *metrics)
        self._start("tail", "tail", "--model", self._options.model, *self._options.tail)
        self._start("head", "head", "--no-whole", "--model", self._options.model, *self._options.head)
        if self._options.flower_port is not None:
            self._start("flower", "flower", "--port", str(self._options.flower_port))

    def _start(self, name: str, *arguments: str) -> Child:
        self._argv[name] = shardq_argv(*arguments)
        return self._processes.start(name, self._argv[name], self._environment())

    def _environment(self) -> dict[str, str]:
        return {**SHARED_CORES, **self._options.environment, **self.addresses.environment()}

    def wait_ready(self, on_wait: Callable[[], None], timeout_s: float = READY_TIMEOUT_S) -> HeadInfo:
        """Wait until a head takes jobs. Raises StackFailed when a process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        client = connect(TaskSettings(broker_url=self.addresses.broker_url))
        try:
            while time.monotonic() < deadline:
                self.check()
                with translated():
                    ready = [head for head in live_heads(client) if head.consuming]
                if ready:
                    return ready[0]
                on_wait()
                time.sleep(0.1)
        finally:
            client.close()
        raise StackFailed(
            f"no head was ready within {timeout_s:.0f} s: see what head and tail wrote, or ask `shardq doctor`"
        )

    def check(self) -> None:
        """Raise StackFailed if a process ended by itself."""
        for child in self._processes.ended():
            raise StackFailed(f"{child.name} {child.how_it_ended()}")

    def restart_ended(self, report: Callable[[str], None]) -> None:
        """Start processes again that ended; raise StackFailed for one that ended early too many times in a row."""
        for child in self._processes.ended():
            is_early = time.monotonic() - child.started < STABLE_S
            self._early_ends[child.name] = self._early_ends[child.name] + 1 if is_early else 0
            if self._early_ends[child.name] > MOST_EARLY_ENDS:
                times = f"{self._early_ends[child.name]} times in a row, each within {STABLE_S:g} s of its start"
                raise StackFailed(f"{child.name} {child.how_it_ended()} ({times})")
            report(f"{child.name} {child.how_it_ended()}; starting it again")
            self._processes.forget(child.name)
            time.sleep(RESTART_PAUSE_S)
            self._processes.start(child.name, self._argv[child.name], self._environment())


class _Prepared:
    """A note of the model files that were found good: asking again would cost a process that imports torch."""

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._model = model

    def is_known(self) -> bool:
        """Whether this very file, or directory, was prepared before and the result is still there."""
        try:
            notes = json.loads(self._path.read_text(encoding="utf-8"))
            return bool(notes[self._model] == self._stamp(notes[self._model][-1]))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return False  # no usable note: prepare

    def remember(self, line: str) -> None:
        """Keep what `shardq models prepare` said: the local directory, a colon, and more."""
        directory = line.rpartition(": ")[0]
        try:
            stamp = self._stamp(directory)
        except OSError:
            return  # a hub id: the hub's own cache answers as quickly as we could
        self._path.write_text(json.dumps({self._model: stamp}), encoding="utf-8")

    def _stamp(self, directory: str) -> list[object]:
        source, result = Path(self._model).stat(), Path(directory).stat()
        return [source.st_size, source.st_mtime_ns, result.st_ino, directory]


@contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    """Hold the data directory. Raises StackFailed while another process does."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(data_dir / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StackFailed(f"cannot use {data_dir}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StackFailed(f"already running in {data_dir}: stop it, or use another --data-dir") from error
    try:
        yield
    finally:
        os.close(descriptor)
