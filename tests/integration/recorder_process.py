"""A process that only records: `python -m tests.integration.recorder_process BROKER_URL DATABASE_URL`."""

from __future__ import annotations

import sys

from storage.database import Database
from tasks.connection import connect
from tasks.recorder import Recorder
from tasks.results import ResultsReader
from tasks.settings import TaskSettings


def main(broker_url: str, database_url: str) -> None:
    """Record until killed."""
    with Database.open(database_url) as database:
        recorder = Recorder(database, ResultsReader(connect(TaskSettings(broker_url=broker_url))))
        while True:
            recorder.record(block_ms=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
