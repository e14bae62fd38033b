"""A short campaign of faults; `make chaos` runs the long one, see docs/chaos.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.chaos.campaign import Options, run
from tests.chaos.plan import Kind
from tests.chaos.report import report

#: What no other test does to processes that work together. The others have tests of their own: kills in test_batches
#: and test_fronts, lost and copied messages in test_bookkeeper and test_fronts_recovery, servers that go away and
#: half-open connections in test_fronts, test_fronts_recovery and test_relay_recovery.
KINDS = (Kind.KILL_SUBMIT, Kind.FREEZE_TAIL, Kind.RESET, Kind.DISK_FULL)


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses prlimit")
def test_four_faults_lose_no_job_double_none_and_change_no_text(tiny: Path) -> None:
    # a machine of continuous integration may be slow: how soon is measured by the long campaign
    options = Options(
        jobs=12,
        faults=len(KINDS),
        num_heads=1,
        kinds=KINDS,
        settle_s=0.8,
        recovery_s=30.0,
        min_tokens=24,
        max_tokens=64,
    )
    # not pytest's directory: the path of an engine's socket would be too long
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        campaign = run(Path(directory) / "system", tiny, options, lambda text: None)
    assert campaign.passed, report(campaign)
