"""Children of `up` and `demo`: their lines, their end, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.errors import StackFailed
from cli.processes import Processes, child_environment, shardq_argv
from cli.stack import Stack, StackOptions

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
    assert ended.tail_of_log() == "why"


def test_a_worker_ends_when_the_process_that_started_it_is_killed(redis_url: str, tmp_path: Path) -> None:
    code = f"""
import time
from cli.processes import Processes, shardq_argv
child = Processes(lambda *_: None).start("bookkeeper", shardq_argv("bookkeeper"), {{
    "SHARDQ_BROKER_URL": {redis_url!r}, "SHARDQ_DATABASE_URL": "sqlite:///{tmp_path}/x.sqlite3"}})
while "at work" not in child.tail_of_log():
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
