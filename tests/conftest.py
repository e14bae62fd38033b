"""Before anything imports Triton, and before anything reads whose machine this is."""

import os

import pytest

from tests import interpreted

__all__ = ["interpreted"]

# for the processes that tests start, too: the user's own file is none of their business
os.environ["SHARDQ_CONFIG"] = "/dev/null"

# their assertions say what was compared, as a test's do; before a test imports them by name
pytest.register_assert_rewrite(
    "tests.integration.parity_benches", "tests.integration.storage_databases", "tests.pair", "tests.acceptance.system"
)
