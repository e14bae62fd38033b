"""Files that only their owner may read: they hold prompts and answers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def create_private(path: Path) -> None:
    """Make an empty file with mode 0600 for SQLite, which gives the files beside it (WAL and its index) the same mode.

    A file that exists stays as it is, mode and all. Nothing is raised: what cannot be made here, SQLite cannot make
    either, and says so.
    """
    # SQLite would follow a link to a file that does not exist yet; an exclusive creation does not.
    target = Path(os.path.realpath(path))
    with suppress(OSError):
        # Only a new file may be opened: closing a file drops the locks that SQLite has on it in this process.
        target.touch(mode=0o600, exist_ok=False)
