"""`shardq flower` before the dashboard starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli_runner import Shardq, error_of


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    return Shardq(tmp_path / "data", {})


def test_a_port_that_is_taken_is_named(run: Shardq) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"the page cannot be at 127.0.0.1:{port}: Address already in use" in error_of(
            run("flower", "--port", str(port))
        )
