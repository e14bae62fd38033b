"""File systems on which SQLite and Redis cannot keep their promises."""

from __future__ import annotations

import re
from pathlib import Path

#: what this machine has mounted where; only Linux tells so
MOUNTS = Path("/proc/self/mountinfo")

#: kinds whose locks or flushes other machines, or a helper process, have to keep; `fuse.sshfs` and its like are `fuse`
_REMOTE = frozenset(
    [
        *("9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "fuse", "fuseblk", "glusterfs", "gpfs", "lustre"),
        *("nfs", "nfs4", "prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs"),
    ]
)
#: how a space and its like stand in the list
_ESCAPED = re.compile(r"\\([0-7]{3})")


def remote_kind(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The kind of file system that a path is on, existing or not, if files there are not this machine's alone.

    None for a local one, and where nobody tells.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = path.expanduser().resolve()
    except (OSError, RuntimeError):
        return None
    kinds = dict(_mount(line) for line in lines if " - " in line)
    # the last one at a place hides those before it
    kind = next((kinds[folder] for folder in (place, *place.parents) if folder in kinds), "")
    return kind if kind.partition(".")[0] in _REMOTE else None


def unsafe(kind: str) -> str:
    """The end of a sentence about a place on such a file system."""
    return (
        f"is on {kind}, where locks and flushes are not kept: SQLite and Redis may lose data or come to harm there; "
        "name a folder on a disk of this machine (--data-dir)"
    )


def _mount(line: str) -> tuple[Path, str]:
    """Where it is mounted, and its kind."""
    before, _, after = line.partition(" - ")
    folder = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
    return Path(folder), after.split(" ")[0]
