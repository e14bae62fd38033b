"""`ssh HOST shardq submit - < prompts.jsonl`: pipes and no terminal. `ssh` is a stand-in without the host."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from cli.processes import child_environment, shardq_argv
from tasks.heads import register_profile
from tests.cli_runner import PROFILE

#: what sshd does with the words: joined, and given to the user's shell
SSH = """#!/bin/sh
shift
exec sh -c "$*"
"""
SHARDQ = """#!/bin/sh
exec {argv} "$@"
"""
Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(tmp_path: Path, redis_url: str) -> Shell:
    """Runs a line of shell, with the stand-ins on its path and without a terminal."""
    for name, text in (("ssh", SSH), ("shardq", SHARDQ.format(argv=" ".join(shardq_argv())))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **child_environment({}),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SHARDQ_BROKER_URL": redis_url,
        "SHARDQ_DATA_DIR": str(tmp_path / "data"),
    }

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line],
            cwd=tmp_path,
            env=environment,
            start_new_session=True,  # no controlling terminal either
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    with redis.Redis.from_url(redis_url) as client:
        register_profile(client, "tiny", PROFILE)
    return run


def test_a_file_is_submitted_through_ssh_and_the_batch_is_all_that_stdout_gets(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"custom_id": "a", "prompt": "one"}\n{"prompt": "zwölf"}\n')
    done = shell("ssh HOST shardq submit - < prompts.jsonl")
    assert done.returncode == 0, done.stderr
    (batch,) = done.stdout.split()
    assert "\x1b" not in done.stdout + done.stderr
    status = json.loads(shell(f"ssh HOST shardq status {batch} --json").stdout)
    assert status["request_counts"]["total"] == 2


def test_a_bad_line_is_named_on_stderr_and_the_exit_status_comes_through(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": 2}\n')
    done = shell("ssh HOST shardq submit - < prompts.jsonl")
    assert done.returncode not in (0, 255)
    assert done.stdout == ""
    assert "line 2" in done.stderr
