"""Where a command writes: stdout, a file that appears only once it is complete, or what is no file."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TextIO

import click

from cli.errors import CliError

#: an option's `-`
STDOUT = Path("-")
#: names here are devices and open files, `/dev/fd/63` of a shell's `>(…)` too
_NO_FILES = (Path("/dev"), Path("/proc"))
#: half a surrogate pair has no UTF-8; written as \\udXXX it is right in JSON
_SURROGATES = "backslashreplace"


def let_streams_take_any_text() -> None:
    """No text for people ends a command: a character that the locale lacks becomes `?`, a closed stream takes all."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def stdout_for_programs() -> TextIO:
    """Stdout for JSON and csv from here on: UTF-8, whatever the locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors=_SURROGATES)
    return sys.stdout


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raises CliError, which names the place and its option, for what the system says while `path` is written."""
    try:
        yield
    except BrokenPipeError:
        raise  # who reads a pipe may leave
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error} ({option} names another place)") from error


@contextmanager
def replaced(path: Path, option: str = "--output") -> Iterator[Path]:
    """A place to write what `path` holds after the block; an exception leaves `path` as it is. Raises CliError.

    A link is followed. What no file can take the place of, as `/dev/null` or a pipe, is written to as it is.
    """
    with writing(path, option):
        _check_rights(path)
        if _is_no_file(path):
            yield path
            return
        target = _behind_link(path)
        temporary = _beside(target)
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def destination(path: Path | None, option: str = "--output") -> Iterator[TextIO]:
    """Stdout for None and `-`, or `replaced`, to write UTF-8 to whatever the locale."""
    if path is None or path == STDOUT:
        out = stdout_for_programs()
        yield out
        out.flush()
        return
    with (
        replaced(path, option) as temporary,
        temporary.open("w", encoding="utf-8", errors=_SURROGATES, newline="") as out,
    ):
        yield out


def check_writable(path: Path, option: str = "--output") -> None:
    """Find out before the work is done what would keep `replaced` from writing it down. Raises CliError."""
    if path == STDOUT:
        return
    with writing(path, option):
        _check_rights(path)
        if not _is_no_file(path):
            temporary = _beside(_behind_link(path))
            temporary.touch()
            temporary.unlink()


def refuse_same_file(places: Mapping[str, Path | None]) -> None:
    """Raises UsageError if two of these are one file: what is written last would be all that is left.

    `places`: by option or argument, what is read before what is written.
    """
    given = [(name, path) for name, path in places.items() if path is not None]
    for (first, path), (second, other) in combinations(given, 2):
        if _is_same_file(path, other):
            message = f"{first} and {second} are the same file, {other}: name another one with {second}"
            raise click.UsageError(message, click.get_current_context(silent=True))


def _is_same_file(first: Path, second: Path) -> bool:
    if first == second == STDOUT:
        return False  # one stream, to which both are written in turn
    first, second = (Path("/dev/stdout") if path == STDOUT else path for path in (first, second))
    try:
        if not (first.exists() and second.exists()):
            return first.resolve() == second.resolve()
        # A device or a pipe keeps nothing that could be lost.
        return first.is_file() and first.samefile(second)
    except (OSError, RuntimeError):
        return False  # what cannot even be looked at is told by who opens it


def _is_no_file(path: Path) -> bool:
    return path.exists() and (not path.is_file() or any(path.is_relative_to(place) for place in _NO_FILES))


def _check_rights(path: Path) -> None:
    # Who may write to the directory may replace a file that is read-only, but hardly means to.
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _behind_link(path: Path) -> Path:
    return path.resolve() if path.is_symlink() else path


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")
