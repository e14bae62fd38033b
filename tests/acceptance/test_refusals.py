"""Workers that cannot work: one line that says why, and a non-zero exit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.system import System


def last_line(system: System) -> str:
    return system.logs().splitlines()[-1].split("| ", 1)[1]


@pytest.mark.parametrize("start", ["start_head", "start_tail"])
def test_a_missing_model_is_one_line(system: System, start: str) -> None:
    child = getattr(system, start)("worker", model="/nowhere/model")
    assert system.wait_ended(child.name) == 1
    assert last_line(system).startswith("Error: ")
    assert "/nowhere/model" in last_line(system)
    assert "Traceback" not in system.logs()


def test_head_and_tail_of_different_models_are_refused_with_both_sides_named(system: System, other_tiny: Path) -> None:
    system.start_tail(model=other_tiny)
    system.start_head(tail_timeout_s=20)
    assert system.wait_ended("head") == 1
    assert "fingerprint" in last_line(system)
    assert "≠" in last_line(system)


def test_a_drafter_with_another_vocabulary_is_refused(system: System, tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-vocabulary"
    other.mkdir()
    for path in tiny.iterdir():
        text = path.read_bytes()
        if path.name == "tokenizer.json":
            text = text.replace(b"<|im_end|>", b"<|im_over|>")
        (other / path.name).write_bytes(text.replace(b"<|im_end|>", b"<|im_over|>") if path.suffix == ".json" else text)
    system.start_head(drafter="model", drafter_model=other)
    assert system.wait_ended("head") == 1
    assert "token" in last_line(system)
    assert "Traceback" not in system.logs()


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("SHARDQ_RELAY_URL", "redis://relay.example:6379/0"),
        ("SHARDQ_RELAY_URL", "redis://127.0.0.1:1/0"),
        ("SHARDQ_BROKER_URL", "redis://queue.example:6379/0"),
        ("SHARDQ_BROKER_URL", "redis://127.0.0.1:1/0"),
    ],
)
def test_a_head_without_its_servers_is_one_line(system: System, variable: str, url: str) -> None:
    system.start("head", "head", "--model", system.model, **{variable: url})
    assert system.wait_ended("head") == 1
    assert last_line(system).startswith("Error: ")
    assert "Traceback" not in system.logs()
