"""Where a command writes: stdout, a file that appears only once it is complete, or what is no file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cli.errors import CliError

#: names here are devices and open files, `/dev/fd/63` of a shell's `>(…)` too
_NO_FILES = (Path("/dev"), Path("/proc"))


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A place to write what `path` holds after the block; an exception leaves `path` as it is. Raises CliError.

    A link is followed. What no file can take the place of, as `/dev/null` or a pipe, is written to as it is.
    """
    try:
        if _is_no_file(path):
            yield path
            return
        target = path.resolve() if path.is_symlink() else path
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error} (--output names another place)") from error


@contextmanager
def destination(path: Path | None) -> Iterator[TextIO]:
    """Stdout, or `replaced` to write text to."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    # Half a surrogate pair has no UTF-8; written as \\udXXX it is right in JSON.
    with (
        replaced(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as out,
    ):
        yield out


def _is_no_file(path: Path) -> bool:
    return path.exists() and (not path.is_file() or any(path.is_relative_to(place) for place in _NO_FILES))
