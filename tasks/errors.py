"""What can go wrong between the database, the queue server and the heads.

TaskError
├── QueueUnreachable    the queue server does not answer
├── QueueRefused        it answers, but will not let us in, or we refuse to talk to it
├── ProfileMismatch     a served name stands for another profile
├── HeadIdTaken         another live head answers to the same id
├── NotAHead            `shardq.generate` was delivered to a process without an engine
└── RecordInvalid       an entry of the results stream cannot be read
"""

from __future__ import annotations


class TaskError(Exception):
    """Root of this package's errors."""


class QueueUnreachable(TaskError):
    """The queue server does not answer."""


class QueueRefused(TaskError):
    """The queue server refuses us (password, permissions), or its address is not safe to use."""


class ProfileMismatch(TaskError):
    """A served name is registered with another profile; the message names both sides."""


class HeadIdTaken(TaskError):
    """Another live head answers to the same id."""


class NotAHead(TaskError):
    """A generation was delivered to a process without an engine."""


class RecordInvalid(TaskError):
    """An entry of the results stream cannot be read."""
