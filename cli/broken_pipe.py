"""Readers that leave before the end, as `head` does: no error, but nothing is left to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from cli.errors import ExitCode


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the command without a word once nobody reads what it writes."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(drop_the_rest()) from None


def drop_the_rest() -> ExitCode:
    """Keep Python from writing at its end what is left for a reader who has gone; what the command exits with."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
    return ExitCode.READER_LEFT
