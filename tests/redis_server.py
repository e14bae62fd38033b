"""Servers for tests: the embedded one, missing only where the developer has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relay.embedded import EmbeddedRedis, find_server
from relay.errors import EmbeddedRedisFailed


@contextmanager
def running_redis(directory: Path, *, persistent: bool = False, password: str | None = None) -> Iterator[EmbeddedRedis]:
    """A fresh server on a free port. Without a server binary: skips locally, fails in CI."""
    try:
        find_server()
    except EmbeddedRedisFailed as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with EmbeddedRedis(directory, persistent=persistent, password=password) as server:
        yield server
