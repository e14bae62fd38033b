"""Settings from a file: what wins, what is refused, what children see, what `shardq config` says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.catalogue import PROCESSES, all_settings, settings_of
from cli.commands.config import COMMANDS
from cli.config_file import ORIGIN_VARIABLE, apply, default_path, find, read
from cli.errors import ExitCode
from cli.main import shardq
from cli.processes import child_environment
from tests.cli_runner import error_of
from workers.settings import HeadSettings, TailSettings


@contextmanager
def unchanged() -> Iterator[None]:
    """Variables that are set in this block are gone after it: a process sets its own only once."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path) -> Iterator[None]:
    """A data directory of the test's own."""
    with unchanged():
        os.environ.update({"SHARDQ_DATA_DIR": str(tmp_path / "data"), "COLUMNS": "80"})
        yield


class File:
    """A configuration file of a test, and `shardq` reading it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, text: str, *arguments: str, mode: int = 0o600) -> Result:
        self.path.write_text(text, encoding="utf-8")
        self.path.chmod(mode)
        with unchanged():
            return CliRunner().invoke(shardq, ["--config", str(self.path), *arguments])

    def settings(self, text: str, *arguments: str) -> dict[str, Any]:
        """What `shardq config --json` says of each setting."""
        result = self(text, "config", *arguments, "--json")
        assert result.exit_code == ExitCode.OK, result.stderr
        shown: dict[str, Any] = json.loads(result.stdout)["settings"]
        return shown


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "config.toml")


def head_settings(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> HeadSettings:
    """What `shardq … head …` would start a head with."""
    seen: list[HeadSettings] = []
    monkeypatch.setattr("cli.first_checks.check_head", seen.append)
    # the real one imports torch
    monkeypatch.setitem(sys.modules, "workers.head.worker", SimpleNamespace(run=lambda settings, stop: None))
    result = CliRunner().invoke(shardq, [*arguments])
    assert result.exit_code == ExitCode.OK, result.stderr
    return seen[0]


def test_an_option_wins_over_a_variable_over_the_file_over_the_default(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.path.write_text('model = "m"\nslots = 4\nlanes = 2\nmax_lanes = 3\n')
    monkeypatch.setenv("SHARDQ_SLOTS", "5")
    monkeypatch.setenv("SHARDQ_LANES", "6")
    settings = head_settings(monkeypatch, "--config", str(file.path), "head", "--lanes", "7")
    assert (settings.lanes, settings.slots, settings.max_lanes, settings.fronts) == (7, 5, 3, 8)


def test_a_table_wins_over_what_stands_outside_of_it_for_its_command_alone(file: File) -> None:
    text = "slots = 4\n[head]\nslots = 12\n"
    assert file.settings(text, "head")["slots"] == {"value": 12, "from": "file [head]"}
    assert file.settings(text, "tail")["slots"] == {"value": 4, "from": "file"}


def test_every_source_is_named(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_DTYPE", "float16")
    shown = file.settings("slots = 4\n[head]\nlanes = 2\n", "head")
    sources = {name: shown[name]["from"] for name in ("dtype", "slots", "lanes", "fronts", "data_dir")}
    assert (sources["dtype"], sources["slots"], sources["lanes"]) == ("environment", "file", "file [head]")
    assert (sources["fronts"], sources["data_dir"]) == ("default", "environment")
    assert file.settings("")["database_url"]["from"] == "data directory"


def test_the_list_fits_80_columns_and_names_the_file(file: File) -> None:
    result = file(f'trace = "{"x" * 100}"\n', "config")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert str(file.path) in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slot = 4", "slot is no setting of shardq: did you mean slots?"),
        ("[head]\ndraft_lenght = 4", "[head] draft_lenght is no setting of [head]: did you mean draft_length?"),
        ('[tail]\ndrafter = "none"', "[tail] drafter is no setting of [tail]"),
        ("[heads]\nslots = 4", "there is no table [heads], only [head], [tail], [bookkeeper], [flower]"),
        ("head = 4", "head is a table: write [head]"),
        ('slots = "many"', "slots: expected a whole number from 1 or \"auto\", not 'many'"),
        ('max_length = "512"', "max_length: expected a whole number from 16, not '512'"),
        ("max_lanes = 65", "max_lanes: expected a whole number from 1 up to 64, not 65"),
        ("graphs = 1", "graphs: expected true or false, not 1"),
        ('dtype = "int4"', 'dtype: expected "float32" or "float16" or "bfloat16", not \'int4\''),
        ("log_level = 3", 'log_level: expected "debug" or'),
        ("cache_dir = 3", "cache_dir: expected a path, not 3"),
        ("trace = 2026-01-01", "trace: expected a text"),
        ("slots = ", "is no TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_file_key_and_what_was_expected(
    file: File, text: str, message: str
) -> None:
    result = file(text, "config")
    assert result.exit_code == ExitCode.USAGE
    assert message in error_of(result)
    assert str(file.path) in error_of(result)


def test_a_file_that_was_named_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(shardq, ["--config", str(tmp_path / "none.toml"), "config"])
    assert f"cannot read {tmp_path / 'none.toml'}" in error_of(result)


def test_a_password_that_others_may_read_is_refused_without_being_shown(file: File) -> None:
    text = '[bookkeeper]\nbroker_url = "rediss://user:passw0rd@host:6379/0"\n'
    result = file(text, "config", "bookkeeper", mode=0o640)
    assert f"chmod 600 {file.path}" in error_of(result)
    allowed = file(text, "config", "bookkeeper", mode=0o600)
    assert allowed.exit_code == ExitCode.OK
    assert "user:***@host" in allowed.stdout
    assert "passw0rd" not in result.output + allowed.output


def test_a_file_without_passwords_may_be_read_by_everybody(file: File) -> None:
    assert file("slots = 4", "config", mode=0o644).exit_code == ExitCode.OK


def test_the_file_is_the_named_one_else_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SHARDQ_CONFIG")
    assert default_path() == tmp_path / "shardq" / "config.toml"
    assert find() is None
    default_path().parent.mkdir()
    default_path().touch()
    assert find() == default_path()
    monkeypatch.setenv("SHARDQ_CONFIG", "/dev/null")
    assert find() == Path("/dev/null")


def test_a_child_reads_the_file_for_itself_and_keeps_real_variables(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDQ_LANES", "2")
    file.path.write_text("slots = 4\nlanes = 3")
    monkeypatch.setenv("SHARDQ_CONFIG", str(file.path))
    apply(read(file.path), "up")
    assert os.environ["SHARDQ_SLOTS"] == "4"
    child = child_environment({})
    assert not {"SHARDQ_SLOTS", ORIGIN_VARIABLE} & set(child)
    assert (child["SHARDQ_LANES"], child["SHARDQ_CONFIG"]) == ("2", str(file.path))


@pytest.mark.parametrize(("process", "settings"), [("head", HeadSettings), ("tail", TailSettings)])
def test_every_setting_of_a_worker_can_stand_in_the_file(
    process: str, settings: type[HeadSettings | TailSettings]
) -> None:
    assert set(settings.model_fields) <= set(settings_of(process))


def test_every_default_is_a_value_that_the_file_may_hold() -> None:
    for setting in all_settings().values():
        if isinstance(setting.default, str | int | float):
            assert isinstance(setting.as_text(setting.default), str)


def test_config_takes_the_commands_that_have_tables() -> None:
    assert tuple(PROCESSES) == COMMANDS


def test_a_place_that_may_not_be_looked_into_is_told_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.delenv("SHARDQ_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", denied)
    result = CliRunner().invoke(shardq, ["config"])
    assert result.exit_code == ExitCode.USAGE
    assert f"cannot look for {tmp_path}/shardq/config.toml: Permission denied" in result.stderr
    assert "SHARDQ_CONFIG" in result.stderr
    assert "unexpected" not in result.stderr
