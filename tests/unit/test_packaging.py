"""What an installation holds, and that its generic package names are ours."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.main import COMMANDS, shardq
from tasks.openai_parameters import RULES
from workers.head.fronts import FRONT, ours_first

ROOT = Path(__file__).parents[2]
PACKAGES = ("cli", "relay", "shardq", "storage", "tasks", "workers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_exactly_our_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected | {"cli/prompts.jsonl"}


def test_the_wheel_carries_the_prompts_of_the_demo_as_a_file(wheel: zipfile.ZipFile) -> None:
    lines = wheel.read("cli/prompts.jsonl").decode().splitlines()
    assert wheel.read("cli/prompts.jsonl") == (ROOT / "examples" / "prompts.jsonl").read_bytes()
    assert len({json.loads(line)["custom_id"] for line in lines}) == 16


def test_the_wheel_carries_the_license(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert "Apache License" in wheel.read(name).decode()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_imported_package_is_ours(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / package


def test_the_distribution_cannot_be_uploaded_by_mistake() -> None:
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]


def test_every_constraint_is_an_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)


def test_every_dependency_has_a_constraint() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    optional = PROJECT["project"]["optional-dependencies"]
    named = [
        *PROJECT["project"]["dependencies"],
        *(item for name in optional if name != "gpu" for item in optional[name]),
    ]
    names = {re.match(r"[\w.-]+", item).group().lower() for item in named if not item.startswith("shardq[")}  # type: ignore[union-attr]
    assert names <= pinned


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group, with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL_COMMANDS = list(commands(shardq))


def section_of(words: tuple[str, ...]) -> str:
    """The part of `docs/cli.md` under the command's heading."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    heading = f"`shardq {' '.join(words)}`"
    parts = re.split(r"^(#{2,4} .*)$", text, flags=re.MULTILINE)
    found = [body for title, body in zip(parts[1::2], parts[2::2], strict=True) if heading in title]
    assert found, f"docs/cli.md has no heading with {heading}"
    return found[0]


@pytest.mark.parametrize(("words", "command"), ALL_COMMANDS, ids=[" ".join(words) for words, _ in ALL_COMMANDS])
def test_every_command_and_option_is_documented(words: tuple[str, ...], command: click.Command) -> None:
    section = section_of(words)
    for parameter in command.params:
        names = (
            parameter.opts if isinstance(parameter, click.Option) else [parameter.make_metavar(click.Context(command))]
        )
        for name in names:
            assert name.strip("[]") in section, f"{name} of {' '.join(words)} is not documented"


def test_every_parameter_that_works_is_documented_and_an_option() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    options = {option for parameter in dict(ALL_COMMANDS)[("submit",)].params for option in parameter.opts}
    for name in RULES:
        assert any(f"`{name}`" in row.split("|")[1] for row in rows), f"{name} is not documented"
        singular = name.removesuffix("s") if name == "stop_token_ids" else name
        assert f"--{singular.replace('_', '-')}" in options or name in ("best_of", "max_completion_tokens")
    shown = set(re.findall(r"`(--[a-z-]+)`", "\n".join(row.split("|")[-2] for row in rows)))
    assert shown <= options


def test_every_documented_command_exists() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = re.findall(r"^#{2,4} `shardq ([\w -]+)`$", text, flags=re.MULTILINE)
    assert {tuple(words.split()) for words in documented} == {words for words, _ in ALL_COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_says_the_same_as_each_command(name: str) -> None:
    command = shardq.get_command(click.Context(shardq), name)
    assert command is not None
    assert (command.help or "").split("\n\n")[0] == COMMANDS[name][1]


#: packages of somebody else's, under each of our plain names
STRANGERS = ("cli", "relay", "storage", "tasks", "workers")


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    for name in STRANGERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is not shardq')\n")
    return tmp_path


def in_company(strangers: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the strangers are found first: in the working folder and, if asked, by PYTHONPATH."""
    argv = [sys.executable, "-c", code]
    return subprocess.run(
        argv, cwd=strangers, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_packages_of_others_under_our_plain_names_do_not_get_in_the_way(strangers: Path) -> None:
    found_last = f"import sys; sys.path.append({str(ROOT)!r})"
    module, _, name = PROJECT["project"]["scripts"]["shardq"].partition(":")
    command = f"{found_last}; sys.argv = ['shardq', '--quiet', 'config']; from {module} import {name}; {name}()"
    shown = in_company(strangers, command, PYTHONPATH=str(strangers), SHARDQ_CONFIG="/dev/null")
    assert (shown.returncode, shown.stderr) == (0, "")
    notebook = f"{found_last}; from shardq import Client; import tasks; print(tasks.__file__)"
    assert in_company(strangers, notebook).stdout.strip() == str(ROOT / "tasks" / "__init__.py")


def test_a_package_that_was_imported_under_one_of_our_names_is_named(strangers: Path) -> None:
    (strangers / "tasks" / "__init__.py").write_text("")
    refused = in_company(strangers, f"import tasks, sys; sys.path.append({str(ROOT)!r}); import shardq")
    assert f"{strangers}/tasks/__init__.py was imported as 'tasks', which shardq needs" in refused.stderr


def test_fronts_of_a_head_find_our_packages_in_any_folder(strangers: Path) -> None:
    code = "import workers.head.front_settings; print(workers.__file__)"
    environment = ours_first({**os.environ, "PYTHONPATH": str(strangers)})
    argv = [sys.executable, *FRONT[: FRONT.index("-m")], "-c", code]
    ran = subprocess.run(argv, cwd=strangers, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(ROOT / "workers" / "__init__.py")
