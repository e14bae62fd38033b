"""Copies of an SQLite database that others may be using."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from storage.private_files import create_private


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy the committed state of one moment into the file `target`; a new one is private. Raises sqlite3.Error."""
    create_private(target)
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
