"""A small edition of `make large`: the same path, the same bounds but those of time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.large import Setup, measure, table
from relay.embedded import find_server
from relay.errors import EmbeddedRedisFailed

SETUP = Setup(lines=5000, bad=60, through_queue=300, long_lines=400)

#: megabytes: a command without a file takes about 75
MAX_COMMAND_MB = 150
#: megabytes of 300 jobs of 700 characters, and of 400 lines of 24,000
MAX_WINDOW_MB, MAX_LONG_MB = 8, 48


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_large_file_takes_bounded_memory_from_submission_to_results(tmp_path: Path) -> None:
    try:
        find_server()
    except EmbeddedRedisFailed as error:
        pytest.skip(str(error))
    figures = measure(SETUP, tmp_path)

    assert figures.results_lines == SETUP.lines
    assert figures.bad_named == SETUP.bad
    assert figures.bad_printed == 20
    assert 0 < max(figures.submit_mb, figures.results_mb, figures.check_mb) < MAX_COMMAND_MB
    assert 0 < max(figures.queue_mb, figures.flow_mb) < MAX_WINDOW_MB
    assert 0 < figures.long_mb < MAX_LONG_MB
    assert figures.fed_per_s > 0
    assert f"{SETUP.bad} ({figures.bad_printed} printed)" in table(SETUP, figures)
