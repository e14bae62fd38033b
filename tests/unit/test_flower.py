"""`shardq flower` before the dashboard starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tasks.watching import LONGEST_RESULT, SILENT_S, FrontsAsHeads
from tests.cli_runner import Shardq, error_of


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    return Shardq(tmp_path / "data", {})


def test_a_port_that_is_taken_is_named(run: Shardq) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"the page cannot be at 127.0.0.1:{port}: Address already in use" in error_of(
            run("flower", "--port", str(port))
        )


def beat(front: str, timestamp: float, active: int, kind: str = "worker-heartbeat") -> dict[str, Any]:
    return {"type": kind, "hostname": front, "timestamp": timestamp, "active": active, "processed": 10}


def test_fronts_are_one_head_with_the_jobs_of_all_of_them() -> None:
    shown = FrontsAsHeads()
    shown(beat("gpu-1-0@vm", 1.0, 3))
    both = shown(beat("gpu-1-1@vm", 2.0, 4))
    assert both is not None
    assert (both["hostname"], both["active"], both["processed"]) == ("gpu-1", 7, 20)
    assert shown(beat("gpu-1-0@vm", 3.0, 0, "worker-offline")) is None
    last = shown(beat("gpu-1-1@vm", 4.0, 0, "worker-offline"))
    assert last is not None
    assert (last["type"], last["hostname"]) == ("worker-offline", "gpu-1")


def test_a_front_that_was_killed_counts_no_more() -> None:
    shown = FrontsAsHeads()
    shown(beat("h-0@vm", 1.0, 3))
    later = shown(beat("h-1@vm", 1.0 + SILENT_S + 1, 4))
    assert later is not None
    assert later["active"] == 4


@pytest.mark.parametrize(
    ("kind", "field", "told", "seen"),
    [
        ("task-received", "args", "my id batch_1 org/model", "my id org/model"),
        ("task-received", "args", "id batch_2 model", "id batch_2 model"),
        ("task-received", "args", "(1, 2)", "(1, 2)"),
        ("task-received", "args", "", ""),
        ("task-succeeded", "result", "{'tps': 31.46, 'tokens': 2, 'finish': 'stop'}", "tps=31.46 tokens=2 stop"),
        ("task-succeeded", "result", "{'tokens': 0, 'finish': None}", "tokens=0 None"),
        ("task-progress", "result", "tps=31.2 tokens=150", "tps=31.2 tokens=150"),
        ("task-retried", "result", None, None),
    ],
)
def test_a_job_is_told_in_few_words(kind: str, field: str, told: str | None, seen: str | None) -> None:
    event = {"type": kind, "hostname": "h-0@vm", "uuid": "batch_1-17.1", field: told}
    shown = FrontsAsHeads()(event)
    assert shown is not None
    assert (shown["hostname"], shown[field]) == ("h", seen)


def test_a_failure_is_told_in_place_of_a_result() -> None:
    event = {"type": "task-failed", "hostname": "h-0@vm", "uuid": "b-1.1", "result": "{'tps': None}"}
    for why, seen in (("internal: no", "internal: no"), ("x" * 99, "x" * (LONGEST_RESULT - 1) + "…")):
        shown = FrontsAsHeads()({**event, "exception": why})
        assert shown is not None
        assert (shown["result"], shown["exception"]) == (seen, why)
