"""The log lines of one real run, as a collector of logs reads them."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from cli.errors import ExitCode
from tests.acceptance.system import System


def records(system: System) -> list[dict[str, Any]]:
    """Every line that every process wrote; fails on one that is no record."""
    return [json.loads(line.split("| ", 1)[1]) for line in system.logs().splitlines()]


def test_one_job_can_be_followed_through_every_process_by_its_id(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDQ_LOG_FORMAT", "json")
    system.start_all()
    batch = system.submit([{"prompt": f"prompt {n}", "max_tokens": 6} for n in range(3)])
    assert system.wait_for(batch).counts.completed == 3
    for child in ("head", "tail", "bookkeeper"):
        assert system.stop(child, number=signal.SIGINT) == ExitCode.INTERRUPTED

    seen = records(system)
    processes = {record["process"] for record in seen}
    assert {"bookkeeper", "head", "tail"} <= processes
    assert all(record.keys() >= {"time", "level", "process", "event"} for record in seen)
    job = f"{batch}-2"
    (front,) = {record["process"] for record in seen if record.get("job") == job} - {"bookkeeper", "head"}
    assert front.startswith("front-")
    followed = [(record["process"], record["event"].split(":")[0]) for record in seen if record.get("job") == job]
    assert followed == [(front, "job taken"), ("head", "generation ended"), ("bookkeeper", "outcome recorded")]
    assert sum(record["event"].startswith("interrupted: ") for record in seen) == 3
    assert {record["attempt"] for record in seen if record.get("job") == job} == {1}
