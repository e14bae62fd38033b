"""Before anything imports Triton."""

from tests import interpreted

__all__ = ["interpreted"]
