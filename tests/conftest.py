"""Before anything imports Triton, and before anything reads whose machine this is."""

import os

from tests import interpreted

__all__ = ["interpreted"]

# for the processes that tests start, too: the user's own file is none of their business
os.environ["SHARDQ_CONFIG"] = "/dev/null"
