"""`shardq demo` as a stranger runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cli.processes import child_environment, shardq_argv


@pytest.mark.timeout(600)
def test_the_demo_runs_16_prompts_and_leaves_their_results(tmp_path: Path) -> None:
    environment = child_environment({"SHARDQ_DATA_DIR": str(tmp_path)})
    argv = shardq_argv("demo", "--json")
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["request_counts"] == {"total": 16, "completed": 16, "failed": 0}
    texts = {job["custom_id"]: job["text"] for job in shown["results"]}
    assert "Paris" in texts["capital"]
    assert "56" in texts["openai-completion"]
    assert "Pluto" not in texts["raw-list"]
