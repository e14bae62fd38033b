"""Errors of the command line and of the Python client; each is one line and, of a command, an exit status.

ShardqError (1)
├── InputRefused (2)
├── NotFound (1)
├── Refused (1)
├── Unavailable (1)
├── PackageMissing (1)
├── SettingInvalid (1)
├── ConfigInvalid (2)
└── CliError (1)
    ├── NotConfirmed (2)
    └── StackFailed (1)

KeyboardInterrupt
└── Interrupted (130)
"""

from __future__ import annotations

from enum import IntEnum


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


class ShardqError(Exception):
    """What was asked could not be done; `message` says why, and what to do about it."""

    exit_code = ExitCode.ERROR

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `message` says what it left behind and how to go on, and is empty where that was told before."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class InputRefused(ShardqError):
    """The input has lines that cannot be jobs."""

    exit_code = ExitCode.USAGE


class NotFound(ShardqError):
    """No batch, job or model of that name."""


class Refused(ShardqError):
    """The batch, name or file is not in a state in which this can be done."""


class Unavailable(ShardqError):
    """The queue server or the database cannot be used right now."""


class PackageMissing(ShardqError):
    """What was asked needs a Python package that is not installed."""


class SettingInvalid(ShardqError):
    """A variable, or what was given in its place, has a value that cannot be used."""


class ConfigInvalid(ShardqError):
    """The configuration file cannot be used."""

    exit_code = ExitCode.USAGE


class CliError(ShardqError):
    """A command could not do its work."""


class NotConfirmed(CliError):
    """Something that cannot be undone needs a yes, and nobody was there to give it."""

    exit_code = ExitCode.USAGE


class StackFailed(CliError):
    """A process that `up` or `demo` started ended by itself or did not become ready."""
