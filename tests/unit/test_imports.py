"""Who may import whom, and what the command line does not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cli", "relay", "shardq", "storage", "tasks", "workers")

#: package → our packages it may import beside itself
ALLOWED = {
    "cli": {"relay", "storage", "tasks", "workers"},
    "shardq": {"cli"},
    "tasks": {"relay", "storage"},
    "storage": set(),
    "relay": set(),
    "workers": {"relay", "tasks"},
}

#: what the command line may load of `workers`: settings, and what a worker's own process runs
CLI_MAY_IMPORT = {
    "workers.settings",
    "workers.errors",
    "workers.gpus",
    "workers.head.worker",
    "workers.tail.worker",
    "workers.whole.worker",
    "workers.engine.source",
}

#: what the client's room takes of the rest of `cli`: nothing with a terminal in it
CLIENT_MAY_IMPORT = {
    "cli.config_file",
    "cli.errors",
    "cli.interruption",
    "cli.next_steps",
    "cli.output",
    "cli.reasons",
    "cli.setting_errors",
    "cli.settings",
    # its usual voice, once a client is made
    "cli.terminal",
}
#: and of the output its words, not its printing
WORDS = {"counted", "duration", "moment"}

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "gguf")


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = ALLOWED[package] | {package}
    for path in modules(package):
        ours = {name.split(".")[0] for name in imports_of(path)} & set(PACKAGES)
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {sorted(ours - allowed)}"


def test_no_product_code_imports_tests_or_benchmarks() -> None:
    for package in PACKAGES:
        for path in modules(package):
            assert not {name.split(".")[0] for name in imports_of(path)} & {"tests", "benchmarks", "scripts"}, path


@pytest.mark.parametrize(
    ("one", "other"), [("head", "tail"), ("tail", "head"), ("head", "whole"), ("tail", "whole"), ("engine", "whole")]
)
def test_head_and_tail_never_import_each_other_nor_what_joins_them(one: str, other: str) -> None:
    for path in sorted((ROOT / "workers" / one).rglob("*.py")):
        for name in imports_of(path):
            assert not f"{name}.".startswith(f"workers.{other}."), path


def test_torch_is_imported_only_below_workers() -> None:
    for package in PACKAGES[:-1]:
        for path in modules(package):
            heavy = {name.split(".")[0] for name in imports_of(path)} & set(HEAVY)
            assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"


def test_the_command_line_reaches_into_workers_only_to_run_one() -> None:
    for path in modules("cli"):
        ours = {name for name in imports_of(path) if name.split(".")[0] == "workers"}
        assert ours <= CLI_MAY_IMPORT, f"{path.relative_to(ROOT)} imports {sorted(ours - CLI_MAY_IMPORT)}"


def test_the_client_knows_no_terminal() -> None:
    for path in sorted((ROOT / "cli" / "client").rglob("*.py")):
        names = set(imports_of(path))
        assert not {name.split(".")[0] for name in names} & {"click", "rich"}, path
        ours = {name for name in names if name.startswith("cli.") and not name.startswith("cli.client.")}
        assert ours <= CLIENT_MAY_IMPORT, f"{path.relative_to(ROOT)} imports {sorted(ours - CLIENT_MAY_IMPORT)}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "cli.output":
                assert {alias.name for alias in node.names} <= WORDS, path


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    return set(result.stdout.split())


def test_importing_the_command_line_loads_next_to_nothing() -> None:
    loaded = loaded_after("import cli.main")
    assert not loaded & {*HEAVY, "celery", "redis", "sqlalchemy", "rich", "pydantic"}


def test_importing_the_client_loads_next_to_nothing() -> None:
    loaded = loaded_after("from shardq import Client")
    assert not loaded & {*HEAVY, "celery", "redis", "sqlalchemy", "click", "rich", "pydantic", "pandas"}


def test_a_command_that_reads_the_database_loads_nothing_of_the_queue() -> None:
    assert not loaded_after("import cli.commands.list") & {"celery", "kombu", "redis"}


def test_importing_every_command_loads_no_torch() -> None:
    statement = "import importlib, cli.main\nfor m, _ in cli.main.COMMANDS.values(): importlib.import_module(m)"
    assert not loaded_after(statement) & {*HEAVY, "pyarrow"}


def test_the_celery_app_and_the_fronts_load_no_torch() -> None:
    assert not loaded_after("import tasks.app, tasks.bookkeeper, workers.head.front") & set(HEAVY)
