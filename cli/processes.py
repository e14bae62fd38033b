"""Child processes of one terminal: their log lines, their unexpected ends, their orderly stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from cli.config_file import ORIGIN_VARIABLE, from_file

#: seconds a child may take after SIGINT before SIGTERM, and after that before SIGKILL
GRACE_S = 30.0
TERMINATE_S = 5.0
#: lines of a child kept to show when it fails
KEPT_LINES = 200
#: the variable with which a child is told whom to die with
PARENT_VARIABLE = "SHARDQ_PARENT_PID"

#: how a line of our own logs begins, for people or as JSON, and the levels that tell of a fault
_LOGGED = re.compile(r"\d\d:\d\d:\d\d \[|\{")
_GRAVE = re.compile(r"\S+ \[(error|critical) *\]|\{.*\"level\": ?\"(error|critical)\"")
#: in what a head's front logged: it may be at fault as little as any other process that lost its engine
_FRONT = re.compile(r"\] front-\d+ |\"front-\d+\"")

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

    def how_it_ended(self) -> str:
        """By which status or signal an ended child ended, and the line that says why."""
        number = self.process.returncode
        how = f"ended with status {number}" if number >= 0 else f"was ended by {_signal_name(-number)}"
        return f"{how}: {explanation(self.lines)}"


def explanation(lines: Iterable[str]) -> str:
    """Of a failed process' last lines the one that says why, without the prefix of our own errors.

    It is seldom the last: who depended on the process complains behind it. Our own error says most, then what did not
    come from our logs (a runtime that gives up writes past them), then what was logged as a fault.
    """
    written = [line for line in lines if line.strip()]
    own = [line.removeprefix("Error: ") for line in written if line.startswith("Error: ")]
    grave = [line for line in written if _GRAVE.match(line) and not _FRONT.search(line)]
    if told := own or _outcry(written) or grave:
        return told[-1]
    return f"no reason given, its last line: {written[-1]}" if written else "it said nothing"


def _outcry(lines: list[str]) -> list[str]:
    """The line of the last ones past our logs that says what happened, alone: a traceback's last, else the first."""
    runs = [list(run) for is_logged, run in groupby(lines, key=lambda line: bool(_LOGGED.match(line))) if not is_logged]
    if not runs:
        return []
    flush = [line for line in runs[-1] if not line[0].isspace()] or runs[-1]
    return flush[-1:] if any(line.startswith("Traceback (") for line in flush) else flush[:1]


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name}, as the system does where memory runs out" if name == "SIGKILL" else name


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
