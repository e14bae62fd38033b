"""`shardq demo` as a stranger runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cli.errors import NotFound
from cli.packaged_model import find
from cli.processes import child_environment, shardq_argv


@pytest.mark.slow
def test_the_demo_runs_16_prompts_and_leaves_their_results(tmp_path: Path) -> None:
    try:
        find()
    except NotFound as error:
        pytest.skip(str(error))
    environment = child_environment({"SHARDQ_DATA_DIR": str(tmp_path)})
    argv = shardq_argv("demo", "--json")
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["request_counts"] == {"total": 16, "completed": 16, "failed": 0}
    texts = {job["custom_id"]: job["text"] for job in shown["results"]}
    assert "Paris" in texts["capital"]
    assert "56" in texts["openai-completion"]
    assert "Pluto" not in texts["raw-list"]
