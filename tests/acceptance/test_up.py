"""`shardq up` in one terminal, other commands in another."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from cli.errors import ExitCode
from cli.processes import child_environment, shardq_argv

REQUEST = '{"custom_id": "a", "prompt": "hello", "max_tokens": 8}\n'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    inherited = child_environment({"SHARDQ_DATA_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"})
    addresses = ("SHARDQ_BROKER_URL", "SHARDQ_RELAY_URL", "SHARDQ_DATABASE_URL")
    return {name: value for name, value in inherited.items() if name not in addresses}


@pytest.fixture
def up(tmp_path: Path, tiny: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    log = tmp_path / "up.log"
    argv = shardq_argv(
        "up",
        "--model",
        str(tiny),
        "--name",
        "tiny",
        "--max-length",
        "128",
        "--slots",
        "4",
        "--fronts",
        "1",
        "--metrics-port",
        "0",
    )
    with log.open("w") as out:
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        sys.stdout.write(log.read_text())


def wait_for(log: Path, text: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def shardq(environment: dict[str, str], *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = shardq_argv(*arguments)
    return subprocess.run(argv, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def children_of(pid: int) -> list[int]:
    """Every descendant of a process."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in pairs if its_parent == parent]
    return found[1:]


def wait_gone(pids: list[int], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_other_terminals_find_it_and_ctrl_c_stops_everything_in_order(
    up: subprocess.Popen[str], environment: dict[str, str], tmp_path: Path
) -> None:
    wait_for(tmp_path / "up.log", "ready: tiny")
    result = shardq(environment, "submit", "-", "--wait", stdin=REQUEST)
    assert result.returncode == 0, result.stderr
    doctor = shardq(environment, "doctor", "--json")
    assert doctor.returncode == 0
    grades = {finding["check"]: finding["grade"] for finding in json.loads(doctor.stdout)}
    assert {grades[check] for check in ("queue", "wire", "bookkeeper", "heads", "tails")} == {"ok"}

    (page,) = re.findall(r"metrics on (http://\S+)", (tmp_path / "up.log").read_text())
    assert b'shardq_head_consuming{head="' in urlopen(page, timeout=10).read()

    children = children_of(up.pid)
    assert len(children) >= 6
    os.kill(up.pid, signal.SIGINT)
    assert up.wait(60) == ExitCode.INTERRUPTED
    assert f"stopped: queue and results are kept in {tmp_path / 'data'}" in (tmp_path / "up.log").read_text()
    wait_gone(children, timeout_s=1)
    assert not (tmp_path / "data" / "up.json").exists()
    # What stands in the database stays.
    assert shardq(environment, "status", result.stdout.split()[0]).returncode == 0


def test_nothing_is_left_when_it_is_killed(up: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for(tmp_path / "up.log", "tail │")
    children = children_of(up.pid)
    assert len(children) >= 5
    up.kill()
    up.wait()
    wait_gone(children)
