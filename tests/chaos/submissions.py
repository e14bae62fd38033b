"""The submitting user: `shardq submit` again and again, killed in the middle now and then, never giving up."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.errors import ExitCode
from cli.processes import child_environment, shardq_argv
from tests.chaos.field import Field

#: seconds one call may take
CALL_TIMEOUT_S = 60.0
#: seconds before a call that failed is made again
AGAIN_S = 1.0
#: seconds for which a fault waits for a call that it can kill
KILL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Submitted:
    """A file that stands in the database."""

    name: str
    custom_ids: tuple[str, ...]
    #: calls that it took
    num_calls: int


class Submissions:
    """Submits `portions` one after another from a thread of its own, each as soon as `wanted()` says so.

    `wanted(number)` is asked ten times a second whether portion `number` (from 0) shall be submitted now.
    """

    def __init__(
        self, field: Field, portions: Sequence[Sequence[dict[str, Any]]], wanted: Callable[[int], bool]
    ) -> None:
        self._field = field
        self._portions = portions
        self._wanted = wanted
        self.done: list[Submitted] = []
        self.problems: list[str] = []
        #: what stood in the database of each file whose submission was killed
        self.kills: list[str] = []
        self._hurry = threading.Event()
        self._kill = threading.Event()
        self._killed = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="submissions", daemon=True)

    @property
    def num_portions(self) -> int:
        """All of them."""
        return len(self._portions)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hurry(self) -> None:
        """Submit the next portion now."""
        self._hurry.set()

    def finish(self, timeout_s: float) -> None:
        """Submit all that is left, and wait for that."""
        self._wanted = lambda number: True
        self._thread.join(timeout_s)
        self._ending.set()
        if self._thread.is_alive():
            self.problems.append(f"{len(self._portions) - len(self.done)} files were not submitted in {timeout_s:g} s")

    def kill_next(self) -> str:
        """Kill the next call in the middle; returns once that is done, and what then stood in the database.

        After the last portion its file is submitted again, under its name, and that call is killed.
        """
        self._killed.clear()
        self._kill.set()
        self._hurry.set()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._killed.wait(0.1):
                return self.kills[-1]
        self._kill.clear()
        return "nothing was there to hit" if self._thread.is_alive() else self._kill_repetition()

    def _kill_repetition(self) -> str:
        last = len(self._portions) - 1
        with self._call(last) as process:
            where = self._kill_in_the_middle(process, name_of(last))
        if self._finish_call(last) != ExitCode.OK:
            self.problems.append(f"{name_of(last)}: submitting it again under its name failed")
        return f"again: {where}"

    def _run(self) -> None:
        for number in range(len(self._portions)):
            while not (self._hurry.is_set() or self._wanted(number)):
                if self._ending.wait(0.1):
                    return
            self._hurry.clear()
            if not self._submit(number):
                return

    def _submit(self, number: int) -> bool:
        """Submit one portion, however often that fails; False if it must not fail so."""
        num_calls = 0
        while not self._ending.is_set():
            num_calls += 1
            if self._kill.is_set():
                self._kill.clear()
                with self._call(number) as process:
                    self.kills.append(self._kill_in_the_middle(process, name_of(number)))
                self._killed.set()
                continue
            status = self._finish_call(number)
            if status == ExitCode.OK:
                ids = tuple(request["custom_id"] for request in self._portions[number])
                self.done.append(Submitted(name_of(number), ids, num_calls))
                return True
            if status == ExitCode.USAGE:
                return False
            self._ending.wait(AGAIN_S)
        return False

    def _finish_call(self, number: int) -> int:
        with self._call(number) as process:
            try:
                _, errors = process.communicate(timeout=CALL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                self.problems.append(f"{name_of(number)}: no end within {CALL_TIMEOUT_S:g} s")
                return ExitCode.ERROR
        if process.returncode == ExitCode.USAGE:
            self.problems.append(f"{name_of(number)}: refused: {errors.strip()}")
        if "Traceback" in errors:
            self.problems.append(f"{name_of(number)}: a traceback: {errors.strip()}")
        self._field.hear("submit", f"{name_of(number)}: status {process.returncode}: {errors.strip()}")
        return process.returncode

    def _call(self, number: int) -> subprocess.Popen[str]:
        file = self._write(number)
        return subprocess.Popen(
            shardq_argv("submit", "--name", name_of(number), str(file)),
            env=child_environment(self._field.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _write(self, number: int) -> Path:
        file = self._field.directory / f"{name_of(number)}.jsonl"
        if not file.exists():
            file.write_text("".join(f"{json.dumps(request)}\n" for request in self._portions[number]))
        return file

    def _kill_in_the_middle(self, process: subprocess.Popen[str], name: str) -> str:
        """Stop the call at its next write to the database, kill it there, and say how far it had come.

        Holding SQLite's write lock is what makes a middle long enough to be hit.
        """
        url = self._field.environment["SHARDQ_DATABASE_URL"]
        path = url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as database:
            while process.poll() is None and _status(database, name) is None:
                time.sleep(0.002)
            try:
                database.execute("BEGIN IMMEDIATE")
                time.sleep(0.05)
                process.kill()
                process.communicate()
            finally:
                if database.in_transaction:
                    database.execute("ROLLBACK")
            return f"{name} was {_status(database, name) or 'not there yet'}"


def name_of(number: int) -> str:
    """The batch of portion `number`."""
    return f"chaos-{number + 1}"


def _status(database: sqlite3.Connection, name: str) -> str | None:
    row = database.execute("SELECT status FROM batch WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])
