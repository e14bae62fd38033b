"""Run the command line in this process, as `main` would, with an environment of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.main import shardq


class Shardq:
    """`shardq` with a data directory of its own; `environment` is added to every call."""

    def __init__(self, data_dir: Path, environment: Mapping[str, str]) -> None:
        self.data_dir = data_dir
        self._environment = {"SHARDQ_DATA_DIR": str(data_dir), "COLUMNS": "80", **environment}
        self._runner = CliRunner()

    @property
    def database_url(self) -> str:
        """The database that the commands use."""
        return f"sqlite:///{self.data_dir / 'shardq.sqlite3'}"

    def __call__(self, *arguments: str, stdin: bytes | None = None, **environment: str) -> Result:
        """The command's exit code, stdout and stderr."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("SHARDQ_DATABASE_URL", "SHARDQ_BROKER_URL", "SHARDQ_RELAY_URL", "SHARDQ_ALLOW_INSECURE"):
                # Set, then deleted: whatever the command sets is undone with the context.
                patch.setenv(name, "")
                patch.delenv(name)
            for name, value in {**self._environment, **environment}.items():
                patch.setenv(name, value)
            return self._runner.invoke(shardq, list(arguments), input=stdin)


def error_of(result: Result) -> str:
    """The one line of a failed command; fails on anything like a traceback."""
    assert result.exit_code != 0, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]
