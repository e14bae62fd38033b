"""Addresses of SQLite files. Importing this brings no database along."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

#: what stands for something else in an address; `%` first, since the others are written with it
_SPECIAL = (("%", "%25"), ("?", "%3F"))


def sqlite_url(path: Path) -> str:
    """The address of the database in this file, whatever characters its path has."""
    text = str(path)
    for character, written in _SPECIAL:
        text = text.replace(character, written)
    return f"sqlite:///{text}"


def sqlite_path(url: str) -> str:
    """The file in a `sqlite:///` address, without parameters."""
    return unquote(url.partition(":///")[2].partition("?")[0])
