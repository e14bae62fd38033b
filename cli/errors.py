"""Errors of the command line; each is one line on stderr and an exit status.

CliError (1)
├── ConfigInvalid (2)
├── InputRefused (2)
├── NotConfirmed (2)
├── NotFound (1)
└── StackFailed (1)
"""

from __future__ import annotations

from enum import IntEnum

import click


class ExitCode(IntEnum):
    """What a command's exit status means (documented in `docs/cli.md`)."""

    #: done, and every job it was about succeeded
    OK = 0
    #: could not be done: Redis, database, model, an unknown batch, a failed check
    ERROR = 1
    #: wrong usage: an option, or a line of the input file; nothing was queued
    USAGE = 2
    #: done, but at least one job failed, was cancelled or expired; `compare`: the batches differ
    JOBS_FAILED = 3
    #: the batch has jobs that have not ended yet
    UNFINISHED = 4
    #: ended by Ctrl-C
    INTERRUPTED = 130
    #: nobody reads the output any more; what a shell says of tools that SIGPIPE ends
    READER_LEFT = 141


class CliError(click.ClickException):
    """A command could not do its work."""

    exit_code = ExitCode.ERROR


class ConfigInvalid(CliError):
    """The configuration file cannot be used."""

    exit_code = ExitCode.USAGE


class InputRefused(CliError):
    """The input file has lines that cannot be jobs."""

    exit_code = ExitCode.USAGE


class NotConfirmed(CliError):
    """Something that cannot be undone needs a yes, and nobody was there to give it."""

    exit_code = ExitCode.USAGE


class NotFound(CliError):
    """No batch or model of that name."""


class StackFailed(CliError):
    """A process that `up` or `demo` started ended by itself or did not become ready."""
