"""The notebooks of `deploy/kaggle` run cell by cell, with stand-ins for the secrets and for `shardq`."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cli.commands.workers import head_command, tail_command

NOTEBOOKS = Path(__file__).parents[2] / "deploy" / "kaggle"
COMMANDS = {"head": head_command, "tail": tail_command}
ROLES = tuple(COMMANDS)
SECRETS = {
    "SHARDQ_CA": "a certificate",
    "SHARDQ_HEAD_ENV": "# passwords\nSHARDQ_BROKER_URL=rediss://h:p@q:1/0\nSHARDQ_RELAY_URL=rediss://h:p=@q:2/0\n",
    "SHARDQ_TAIL_ENV": "SHARDQ_RELAY_URL=rediss://t:p@q:2/0\nSHARDQ_TAIL_NAME=tail\n",
}
#: ends with the statuses it was given, one after another, and keeps its arguments
STAND_IN = """#!{python}
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([sys.argv[1:], os.environ["SHARDQ_TLS_CA"], os.environ["SHARDQ_RELAY_URL"]]) + "\\n")
statuses = json.loads((here / "statuses").read_text())
(here / "statuses").write_text(json.dumps(statuses[1:]))
if statuses[0] == "runs on":
    time.sleep(60)
sys.exit(statuses[0])
"""
Run = Callable[..., list[Any]]


def cells(role: str) -> list[str]:
    """The sources of a notebook's code cells."""
    book = json.loads((NOTEBOOKS / f"{role}.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a notebook's cells; the calls of `shardq` that it made."""
    store = ModuleType("kaggle_secrets")
    monkeypatch.setitem(sys.modules, "kaggle_secrets", store)
    command = tmp_path / "bin" / "shardq"
    command.parent.mkdir()
    command.write_text(STAND_IN.format(python=sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (command.parent / "calls").touch()

    def calls(role: str, statuses: list[Any], secrets: dict[str, str] = SECRETS, **changes: Any) -> list[Any]:
        class Client:
            def get_secret(self, name: str) -> str:
                return secrets[name]

        store.UserSecretsClient = Client  # type: ignore[attr-defined]
        (command.parent / "statuses").write_text(json.dumps(statuses))
        first, *others = cells(role)
        names: dict[str, Any] = {}
        exec(compile(first, f"{role}.ipynb", "exec"), names)
        names |= {"VENV": tmp_path, "WORK": tmp_path / "secrets", "FIRST_PAUSE_S": 0.01, "LAST_PAUSE_S": 0.02} | changes
        for source in others:
            exec(compile(source, f"{role}.ipynb", "exec"), names)
        return [json.loads(line) for line in (command.parent / "calls").read_text().splitlines()]

    return calls


@pytest.mark.parametrize("role", ROLES)
def test_a_notebook_is_of_format_4_without_outputs(role: str) -> None:
    book = json.loads((NOTEBOOKS / f"{role}.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("role", ROLES)
def test_what_ends_in_an_error_is_started_again_until_it_ends_in_order(
    run: Run, role: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = run(role, [1, -9, 0])
    assert len(calls) == 3
    assert "again in 0.02 s" in capfd.readouterr().out
    for arguments, authority, address in calls:
        assert Path(authority).read_text() == "a certificate\n"
        assert f"{address}\n" in SECRETS[f"SHARDQ_{role.upper()}_ENV"]
        COMMANDS[role].make_context(role, list(arguments[1:]))
        assert arguments[0] == role


def test_a_head_is_told_to_end_in_time_and_drafts_on_the_other_gpu(run: Run) -> None:
    ((arguments, *_),) = run("head", [0])
    context = COMMANDS["head"].make_context("head", list(arguments[1:]))
    assert 11.4 * 3600 < float(context.params["until"].rstrip("s")) <= 11.5 * 3600
    assert (context.params["device"], context.params["drafter_device"]) == ("cuda:0", "cuda:1")


def test_both_notebooks_tell_their_halves_the_same_of_the_model(run: Run) -> None:
    head, tail = (run(role, [0])[-1][0] for role in ROLES)
    params = [
        COMMANDS[arguments[0]].make_context(arguments[0], list(arguments[1:])).params for arguments in (head, tail)
    ]
    for name in ("model", "dtype", "wire_dtype", "max_length", "split", "quantization"):
        assert params[0][name] == params[1][name]


def test_a_tail_that_runs_on_is_told_to_end_when_the_time_is_up(run: Run) -> None:
    began = time.monotonic()
    assert len(run("tail", ["runs on"], ENDS=time.time() + 0.6, LEAST_S=0.1)) == 1
    assert time.monotonic() - began < 20


def test_a_command_line_that_is_refused_is_not_tried_again(run: Run) -> None:
    with pytest.raises(SystemExit, match="refused"):
        run("head", [2, 0])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["SHARDQ_CA", "env"])
def test_a_secret_that_is_missing_is_named(run: Run, role: str, name: str) -> None:
    name = f"SHARDQ_{role.upper()}_ENV" if name == "env" else name
    with pytest.raises(SystemExit, match=f"{name} is missing: Add-ons > Secrets"):
        run(role, [0], {key: value for key, value in SECRETS.items() if key != name})
    with pytest.raises(SystemExit, match=r"has no .*SHARDQ_RELAY_URL: paste the whole env file"):
        run(role, [0], dict.fromkeys(SECRETS, "nothing"))


def test_a_notebook_without_the_wheel_says_what_to_add(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Add Input"):
        run("head", [0], VENV=tmp_path / "new", INPUT=tmp_path / "input")
