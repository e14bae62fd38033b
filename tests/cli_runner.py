"""Run the command line in this process, as `main` would, with an environment of the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.errors import ExitCode
from cli.main import shardq
from relay.profile import Profile
from storage.addresses import sqlite_url
from storage.database import Database
from storage.job_records import JobRow, OutcomeRow, RunningJob
from storage.jobs import iterate_results, mark_running
from storage.outcomes import record_outcomes
from storage.states import TERMINAL_STATES, JobState

PROFILE = Profile("f" * 64, "float32", "none", "float32", False, 512)
#: two jobs, `a` and `b`
PROMPTS = b'{"custom_id": "a", "prompt": "one"}\n{"custom_id": "b", "prompt": "two"}\n'


class Shardq:
    """`shardq` with a data directory of its own; `environment` is added to every call, `charset` is the locale's."""

    def __init__(self, data_dir: Path, environment: Mapping[str, str], charset: str = "utf-8") -> None:
        self.data_dir = data_dir
        self._environment = {"SHARDQ_DATA_DIR": str(data_dir), "COLUMNS": "80", **environment}
        self._runner = CliRunner(charset)

    @property
    def database_url(self) -> str:
        """The database that the commands use."""
        return sqlite_url(self.data_dir / "shardq.sqlite3")

    @property
    def broker_url(self) -> str:
        """The queue server that the commands use."""
        return self._environment["SHARDQ_BROKER_URL"]

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

    @contextmanager
    def database(self) -> Iterator[Database]:
        """The database that the commands use."""
        with Database.open(self.database_url) as database:
            yield database

    def jobs(self, batch: str) -> dict[str, JobRow]:
        """The batch's jobs by custom_id."""
        with self.database() as database:
            return {job.custom_id: job for job in iterate_results(database, batch)}

    def submit(self, data: bytes = PROMPTS, *options: str) -> str:
        """Submit a file; the batch's id."""
        result = self("submit", *options, "-", stdin=data)
        assert result.exit_code == ExitCode.OK, result.stderr
        return result.stdout.strip()

    def status(self, batch: str) -> dict[str, Any]:
        """What `status --json` prints."""
        shown: dict[str, Any] = json.loads(self("status", batch, "--json").stdout)
        return shown

    def start_jobs(self, batch: str, *custom_ids: str) -> None:
        """Report jobs live, as a head does."""
        jobs = self.jobs(batch)
        with self.database() as database:
            mark_running(database, [RunningJob(jobs[name].id, jobs[name].attempt, "h") for name in custom_ids])

    def end_jobs(self, batch: str, *, code: str = "context_length_exceeded", **ends: JobState) -> None:
        """Record an outcome for every open job of a batch, as the bookkeeper does; completed if not said otherwise.

        `code`: of those that fail.
        """
        rows = [job for job in self.jobs(batch).values() if job.state not in TERMINAL_STATES]
        with self.database() as database:
            record_outcomes(database, [outcome(job, ends.get(job.custom_id, JobState.COMPLETED), code) for job in rows])


def outcome(job: JobRow, state: JobState, code: str = "context_length_exceeded") -> OutcomeRow:
    """An end of the job's current attempt, with figures."""
    text: dict[str, Any] = {"text": "Größe,\nzwei", "token_ids": (1, 2, 3)}
    ends: dict[JobState, dict[str, Any]] = {
        JobState.COMPLETED: {**text, "finish_reason": "stop"},
        JobState.FAILED: {"error_type": code, "error_message": "too long"},
        JobState.CANCELLED: text,
        JobState.EXPIRED: text,
    }
    figures: dict[str, Any] = {"prompt_tokens": 4, "started_at": 1.0, "finished_at": 3.0, "decode_tps": 2.0}
    return OutcomeRow(
        job=job.id,
        attempt=job.attempt,
        head="h",
        state=state,
        **ends[state],
        **figures,
        rounds=2,
        drafted=4,
        accepted=1,
    )


def numbered(count: int, **values: Any) -> bytes:
    """A file of so many prompts, `job-1` and on."""
    rows = ({"custom_id": f"job-{n}", "prompt": f"prompt {n}", **values} for n in range(1, count + 1))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def error_of(result: Result) -> str:
    """The one line of a failed command; fails on anything like a traceback."""
    assert result.exit_code != 0, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]
