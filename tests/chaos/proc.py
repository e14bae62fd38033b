"""Processes as Linux shows them below /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def children(parent: int) -> list[int]:
    """Process ids of the direct children of `parent`, dead ones that wait for their parent left out."""
    found = []
    for pid in _pids():
        stat = _read(pid, "stat")
        # the name, in parentheses, may hold anything
        fields = stat.rpartition(b")")[2].split()
        if len(fields) > 1 and int(fields[1]) == parent and fields[0] != b"Z":
            found.append(pid)
    return sorted(found)


def marked(variable: str, value: str) -> dict[int, str]:
    """Command line by process id of every process that was started with this environment variable."""
    wanted = f"{variable}={value}".encode()
    found = {}
    for pid in _pids():
        if wanted in _read(pid, "environ").split(b"\0") and _read(pid, "stat").rpartition(b")")[2].split()[:1] != [
            b"Z"
        ]:
            found[pid] = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 for one that is gone."""
    fields = _read(pid, "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used; 0 for one that is gone."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty if it has just ended, or is another user's."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
