"""Before anything imports Triton, and before anything reads whose machine this is."""

import os
import signal

import pytest

from tests import interpreted

__all__ = ["interpreted"]

# for the processes that tests start, too: the user's own file is none of their business
os.environ["SHARDQ_CONFIG"] = "/dev/null"

# Whoever starts the tests in the background has them ignore Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# their assertions say what was compared, as a test's do; before a test imports them by name
pytest.register_assert_rewrite(
    "tests.integration.parity_benches", "tests.integration.storage_databases", "tests.pair", "tests.acceptance.system"
)
