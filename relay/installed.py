"""Which shardq this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("shardq")
    except PackageNotFoundError:
        return "unknown (not installed)"
