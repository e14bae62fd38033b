"""`docs/troubleshooting.md` knows every error, every code of a failed job, every reason why nothing moves."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

import cli.errors
import cli.reasons
import relay.errors
import storage.errors
import tasks.errors
import workers.errors
from storage.states import StopCode
from tasks.generation import FailureType
from tests.documents import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def leaves(module: ModuleType) -> Iterator[str]:
    """The error classes of a tree without its root, which is never raised by itself."""
    for name, kind in vars(module).items():
        is_own = isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == module.__name__
        if is_own and kind.__base__ is not Exception:
            yield name


@pytest.mark.parametrize("module", [relay.errors, storage.errors, tasks.errors, workers.errors, cli.errors])
def test_every_error_has_a_cure(module: ModuleType) -> None:
    for name in leaves(module):
        rows = [row for row in TEXT.splitlines() if row.startswith("|") and f"| `{name}` |" in row]
        assert rows, name
        assert all(len(row.split(" | ")[-1]) > len("cure |") for row in rows)


@pytest.mark.parametrize("code", [*FailureType, *StopCode])
def test_every_code_of_a_failed_job_has_a_cure(code: str) -> None:
    assert f"| `{code}` |" in TEXT


def constants(node: ast.expr) -> Iterator[str]:
    """What a yielded text says whatever its figures are."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_every_reason_why_nothing_moves_has_a_cure() -> None:
    tree = ast.parse(inspect.getsource(cli.reasons))
    yielded = [node.value for node in ast.walk(tree) if isinstance(node, ast.Yield) and node.value is not None]
    texts = [next(constants(node)) for node in yielded if any(constants(node))]
    assert len(texts) >= 4
    for text in texts:
        beginning = text.partition(":")[0].partition("(")[0].strip()
        assert beginning in TEXT, text


def said() -> str:
    """Every text of the code that is no docstring; what a figure fills in is `…`."""
    texts = []
    for package in ("cli", "relay", "shardq", "storage", "tasks", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    texts.append("…".join(constants(node)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.col_offset > 4:
                    texts.append(node.value)
    return "\n".join(texts)


def test_every_quoted_message_is_one_that_the_code_has() -> None:
    code = said()
    for row in TEXT.splitlines():
        if not row.startswith("| ") or row.startswith("| message"):
            continue
        for span in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for part in filter(None, re.split(r"\s*…\s*", span)):
                assert part in code, span
