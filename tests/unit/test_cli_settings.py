"""The note of a running `shardq up`, and which addresses a command uses."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from cli.settings import Addresses, CliSettings, RunningStack, use_data_dir
from tests.cli_runner import Shardq

ADDRESSES = Addresses("redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0", "sqlite:////tmp/x.sqlite3")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ADDRESSES.environment():
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_note_is_read_back_while_its_writer_lives(tmp_path: Path) -> None:
    RunningStack(tmp_path).write(ADDRESSES)
    assert RunningStack(tmp_path).read() == ADDRESSES


def test_only_the_user_may_read_the_note(tmp_path: Path) -> None:
    RunningStack(tmp_path).write(ADDRESSES)
    assert stat.S_IMODE((tmp_path / "up.json").stat().st_mode) == 0o600


def test_a_note_of_a_dead_process_does_not_count(tmp_path: Path) -> None:
    RunningStack(tmp_path).write(ADDRESSES)
    note = json.loads((tmp_path / "up.json").read_text())
    note["pid"] = 2**22 + 1
    (tmp_path / "up.json").write_text(json.dumps(note))
    assert RunningStack(tmp_path).read() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', '{"pid": "x", "broker_url": 1}'])
def test_a_damaged_note_does_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "up.json").write_text(text)
    assert RunningStack(tmp_path).read() is None


def test_a_command_uses_a_running_stack(tmp_path: Path) -> None:
    RunningStack(tmp_path).write(ADDRESSES)
    use_data_dir(CliSettings(data_dir=tmp_path))
    assert {name: os.environ[name] for name in ADDRESSES.environment()} == ADDRESSES.environment()


def test_the_environment_wins_over_a_running_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_BROKER_URL", "redis://127.0.0.1:9/0")
    RunningStack(tmp_path).write(ADDRESSES)
    use_data_dir(CliSettings(data_dir=tmp_path))
    assert os.environ["SHARDQ_BROKER_URL"] == "redis://127.0.0.1:9/0"


def test_without_a_stack_only_the_database_is_that_of_the_data_directory(tmp_path: Path) -> None:
    use_data_dir(CliSettings(data_dir=tmp_path))
    assert os.environ["SHARDQ_DATABASE_URL"] == f"sqlite:///{tmp_path}/shardq.sqlite3"
    assert "SHARDQ_BROKER_URL" not in os.environ


def test_every_data_directory_has_a_database_of_its_own_whatever_it_is_called(tmp_path: Path) -> None:
    for name in ("w?1", "w?2", "w%3F1"):
        assert Shardq(tmp_path / name, {})("list").exit_code == 0
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.sqlite3")}
    assert made == {"w?1/shardq.sqlite3", "w?2/shardq.sqlite3", "w%3F1/shardq.sqlite3"}
