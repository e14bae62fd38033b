"""The file that every invalid line's error is written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from cli.client.input_file import ErrorSink, nowhere
from cli.destination import STDOUT, stdout_for_programs, writing
from tasks.json_text import json_text
from tasks.openai_batch import LineError


@contextmanager
def error_file(path: Path | None) -> Iterator[ErrorSink]:
    """Write every error told to this file, or `-`, as a JSON object a line; nowhere without a path. Raises Refused."""
    if path is None:
        yield nowhere
        return
    if path == STDOUT:
        out = stdout_for_programs()
        yield lambda error: click.echo(_json_line(error), file=out)
        return
    with writing(path, "--errors"), path.open("w", encoding="utf-8") as out:

        def write(error: LineError) -> None:
            out.write(_json_line(error) + "\n")

        yield write


def _json_line(error: LineError) -> str:
    return json_text(asdict(error))


def where_all_are(path: Path | None) -> str:
    """Where all errors stand, or how to have them, for the end of a list of the first ones."""
    if path is None:
        return "--errors FILE writes all of them"
    return "all on stdout" if path == STDOUT else f"all in {path}"
