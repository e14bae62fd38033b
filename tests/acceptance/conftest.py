"""Systems of real processes. When a test fails, what they wrote is shown with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.models import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model with tokenizer and chat template."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than `tiny`, with the same tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("models") / "other", layers=6, seed=1)


@pytest.fixture
def system(tmp_path: Path, tiny: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    """Two Redis servers and no other process yet."""
    with System(tmp_path, tiny) as running:
        yield running
        request.node.add_report_section("teardown", "processes", running.new_logs())


@pytest.fixture(scope="session")
def shared_system(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[System]:
    """One system for many tests: a start costs seconds."""
    with System(tmp_path_factory.mktemp("shared"), tiny) as running:
        yield running


@pytest.fixture
def whole_system(shared_system: System, request: pytest.FixtureRequest) -> Iterator[System]:
    """Bookkeeper, tail and head take jobs, whatever the test before did to them."""
    shared_system.start_all()
    yield shared_system
    request.node.add_report_section("teardown", "processes", shared_system.new_logs())
