"""Children of `up` and `demo`: their lines, their end, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.errors import StackFailed
from cli.processes import Processes, child_environment, explanation, shardq_argv
from cli.stack import MOST_EARLY_ENDS, Stack, StackOptions

#: writes "ready", then notes the signal it gets
POLITE = """
import signal, sys, time
def leave(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
time.sleep(60)
"""
STUBBORN = (
    POLITE.replace("    sys.exit(0)\n", "")
    .replace(
        "signal.signal(signal.SIGINT, leave)",
        "signal.signal(signal.SIGINT, leave); signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    )
    .replace("time.sleep(60)", "deadline = time.time() + 60\nwhile time.time() < deadline: time.sleep(0.1)")
)


class Lines(list[tuple[str, str]]):
    def __call__(self, name: str, line: str) -> None:
        self.append((name, line))

    def wait_for(self, line: tuple[str, str]) -> None:
        deadline = time.monotonic() + 30
        while line not in self:
            assert time.monotonic() < deadline, self
            time.sleep(0.02)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_children_are_stopped_in_the_given_order_with_sigint() -> None:
    lines = Lines()
    processes = Processes(lines)
    for name in ("first", "second", "third"):
        processes.start(name, python(POLITE), {})
        lines.wait_for((name, "ready"))
    processes.stop(["second", "first"])
    assert [line for line in lines if line[1].startswith("got")] == [
        ("second", "got SIGINT"),
        ("first", "got SIGINT"),
        ("third", "got SIGINT"),
    ]


def test_a_child_that_ignores_signals_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.processes.TERMINATE_S", 0.3)
    lines = Lines()
    processes = Processes(lines)
    child = processes.start("stubborn", python(STUBBORN), {})
    lines.wait_for(("stubborn", "ready"))
    start = time.monotonic()
    processes.stop([], grace_s=0.3)
    assert time.monotonic() - start < 10
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_ends_by_itself_is_reported_with_its_last_lines() -> None:
    processes = Processes(Lines())
    child = processes.start("brief", python("print('why'); raise SystemExit(3)"), {})
    child.process.wait(30)
    (ended,) = processes.ended()
    assert ended.returncode == 3
    assert ended.how_it_ended() == "ended with status 3: why"


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGABRT, "SIGABRT"), (signal.SIGKILL, "SIGKILL, as the system does where memory runs out")],
)
def test_a_child_that_a_signal_ended_is_reported_with_the_signal(number: signal.Signals, name: str) -> None:
    processes = Processes(Lines())
    code = f"import os; print('memory allocation of 9 bytes failed', flush=True); os.kill(os.getpid(), {int(number)})"
    child = processes.start("brief", python(code), {})
    child.process.wait(30)
    (ended,) = processes.ended()
    assert ended.how_it_ended() == f"was ended by {name}: memory allocation of 9 bytes failed"


FRONTS = [
    "01:02:41 [warning  ] front-5 lost the engine: EOFError:",
    "01:02:41 [warning  ] front-1 lost the engine: EOF",
]
ABORT = [
    "01:02:40 [info     ] front-1 job taken attempt=1 job=batch_3-6",
    "memory allocation of 268435456 bytes failed",
    "stack backtrace:",
    "note: Some details are omitted",
    *FRONTS,
]
TRACEBACK = [
    "01:00:30 [critical ] tail nobody caught ValueError in hello-watcher",
    "Traceback (most recent call last):",
    '  File "worker.py", line 232, in run',
    "ValueError: I/O operation on closed file.",
]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (ABORT, "memory allocation of 268435456 bytes failed"),
        (TRACEBACK, "ValueError: I/O operation on closed file."),
        (["Error: can't start new thread", *TRACEBACK], "can't start new thread"),
        (
            ["Fatal Python error: Segmentation fault", "", "Current thread 0x1:", *FRONTS],
            "Fatal Python error: Segmentation fault",
        ),
        (["01:02:40 [error    ] head out of room", *FRONTS], "01:02:40 [error    ] head out of room"),
        (
            ['{"level": "error", "event": "no room"}', '{"level": "info", "event": "x"}'],
            '{"level": "error", "event": "no room"}',
        ),
        (FRONTS, f"no reason given, its last line: {FRONTS[-1]}"),
        ([], "it said nothing"),
    ],
)
def test_the_line_that_explains_an_end_is_found_above_the_last(lines: list[str], why: str) -> None:
    assert explanation(lines) == why


@contextmanager
def stack_whose_processes_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr("cli.stack.RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr("cli.stack.STABLE_S", 3600.0)
    monkeypatch.setattr("cli.stack.shardq_argv", lambda *_: python(code))
    with Stack(tmp_path, StackOptions(model="m"), Lines()) as stack:
        stack.start_workers()
        yield stack


def serve(stack: Stack, reported: list[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        stack.restart_ended(reported.append)


def test_a_process_that_dies_again_and_again_is_started_again_and_in_the_end_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print('memory allocation failed', flush=True); os.abort()"
    reported: list[str] = []
    with stack_whose_processes_run(code, tmp_path, monkeypatch) as stack, pytest.raises(StackFailed) as failed:
        serve(stack, reported)
    assert max(Counter(reported).values()) == MOST_EARLY_ENDS
    assert " was ended by SIGABRT: memory allocation failed; starting it again" in reported[0]
    assert "was ended by SIGABRT: memory allocation failed (11 times in a row, each within 3600 s of" in str(
        failed.value
    )


def test_a_worker_ends_when_the_process_that_started_it_is_killed(redis_url: str, tmp_path: Path) -> None:
    code = f"""
import time
from cli.processes import Processes, shardq_argv
child = Processes(lambda *_: None).start("bookkeeper", shardq_argv("bookkeeper"), {{
    "SHARDQ_BROKER_URL": {redis_url!r}, "SHARDQ_DATABASE_URL": "sqlite:///{tmp_path}/x.sqlite3"}})
while "started with database" not in child.tail_of_log():
    time.sleep(0.05)
print(child.process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True, env=child_environment({}))
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone(pid)


def test_a_folder_named_like_our_packages_is_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("cli", "tasks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    environment = {**child_environment({}), "SHARDQ_DATA_DIR": str(tmp_path / "data")}
    argv = shardq_argv("list")
    result = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_two_stacks_cannot_share_a_data_directory(tmp_path: Path) -> None:
    options = StackOptions(model="m")
    with (
        Stack(tmp_path, options, Lines()),
        pytest.raises(StackFailed, match="already running"),
        Stack(tmp_path, options, Lines()),
    ):
        pass


def test_a_model_that_cannot_be_prepared_is_one_line(tmp_path: Path) -> None:
    options = StackOptions(model=str(tmp_path / "nowhere"))
    with Stack(tmp_path, options, Lines()) as stack, pytest.raises(StackFailed, match="nowhere"):
        stack.prepare_model(lambda: None)
    assert not (tmp_path / "up.json").exists()
