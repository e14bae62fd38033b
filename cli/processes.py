"""Child processes of one terminal: their log lines, their unexpected ends, their orderly stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.config_file import ORIGIN_VARIABLE, from_file

#: seconds a child may take after SIGINT before SIGTERM, and after that before SIGKILL
GRACE_S = 30.0
TERMINATE_S = 5.0
#: lines of a child kept to show when it fails
KEPT_LINES = 40
#: the variable with which a child is told whom to die with
PARENT_VARIABLE = "SHARDQ_PARENT_PID"

LineSink = Callable[[str, str], None]


def shardq_argv(*arguments: str) -> list[str]:
    """The command line that runs this installation's `shardq`, whatever the working folder holds."""
    return [sys.executable, "-P", "-m", "cli.main", *arguments]


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment with `extra`, and so that the child finds the same packages as we do.

    What came from the configuration file is left out: the child reads that for itself, with its own table.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {
        **{name: value for name, value in os.environ.items() if name not in {*from_file(os.environ), ORIGIN_VARIABLE}},
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",  # as we read it, whatever the locale
        # whoever reads our child's lines shows them to people, unless told otherwise
        "SHARDQ_LOG_FORMAT": os.environ.get("SHARDQ_LOG_FORMAT") or "human",
        PARENT_VARIABLE: str(os.getpid()),
        **extra,
    }


def die_with_parent(check_interval_s: float = 1.0) -> None:
    """In a child: stop as on SIGTERM once the process that started us is gone."""
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is None or int(expected) != os.getppid():
        return  # started by hand, or from a shell that a child of ours opened

    def watch() -> None:
        while os.getppid() == int(expected):
            time.sleep(check_interval_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@dataclass
class Child:
    """One running child and the last lines it wrote."""

    name: str
    process: subprocess.Popen[str]
    started: float
    reader: threading.Thread
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.process.poll()

    def tail_of_log(self) -> str:
        """The last lines it wrote."""
        return "\n".join(self.lines)


class Processes:
    """Children in the order of their start; they are stopped in the order given to `stop`.

    Each child has a session of its own, so that Ctrl-C in the terminal reaches only us and the order is ours.
    """

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink
        self._children: dict[str, Child] = {}

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a child; its stdout and stderr go to the sink line by line."""
        process = subprocess.Popen(
            argv,
            env=child_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        lines: deque[str] = deque(maxlen=KEPT_LINES)
        reader = threading.Thread(target=self._read, args=(name, process, lines), name=f"log-{name}", daemon=True)
        child = Child(name=name, process=process, started=time.monotonic(), reader=reader, lines=lines)
        self._children[name] = child
        reader.start()
        return child

    def _read(self, name: str, process: subprocess.Popen[str], lines: deque[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            self._sink(name, line.rstrip("\n"))

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def ended(self) -> list[Child]:
        """The children that ended by themselves, with all their lines read."""
        ended = [child for child in self._children.values() if child.returncode is not None]
        for child in ended:
            child.reader.join(timeout=2)
        return ended

    def forget(self, name: str) -> None:
        """No longer count an ended child."""
        del self._children[name]

    def stop(self, order: Sequence[str], grace_s: float = GRACE_S) -> None:
        """Stop the named children one after another, then all others; returns when none is left."""
        rest = [name for name in reversed(self._children) if name not in order]
        for name in [*order, *rest]:
            if child := self._children.pop(name, None):
                _stop(child.process, grace_s)
                child.reader.join(timeout=2)

    def kill(self) -> None:
        """End everything at once."""
        for child in self._children.values():
            _signal_group(child.process, signal.SIGKILL)
            child.process.wait()
        self._children.clear()


def _stop(process: subprocess.Popen[str], grace_s: float) -> None:
    """SIGINT to the child, then SIGTERM, then SIGKILL to its whole session."""
    for number, patience_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, TERMINATE_S)):
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue
        break
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the session a child leads; what it left behind goes with it."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # nobody left
