"""What can go wrong between the database, the queue server and the heads.

TaskError
├── QueueUnreachable    the queue server does not answer; trying again is right
│   └── QueueFull       it answers, but takes nothing: full, read-only or without a disk
├── QueueRefused        it answers, but will not let us in, or we refuse to talk to it
├── ModelNameInvalid    a name under which no model can be served
├── ProfileMismatch     a served name stands for another profile
├── HeadIdTaken         another live head answers to the same id
├── NotAHead            `shardq.generate` was delivered to a process without an engine
├── RecordInvalid       an entry of the results stream cannot be read
├── ParameterInvalid    a request's field is not what it should be
├── JobUnfinished       a job has no result to be written
├── OtherDatabase       the bookkeeper writes another database than this one
└── MetricsRefused      `/metrics` cannot be served where it was asked for
"""

from __future__ import annotations


class TaskError(Exception):
    """Root of this package's errors."""


class QueueUnreachable(TaskError):
    """The queue server does not answer. Trying again is right: nothing is lost meanwhile."""


class QueueFull(QueueUnreachable):
    """The queue server answers, but takes nothing: out of memory, read-only, or it cannot write its disk."""


class QueueRefused(TaskError):
    """The queue server refuses us (password, permissions), or its address is not safe to use."""


class OtherDatabase(TaskError):
    """The bookkeeper of the queue server writes another database: what is queued from this one is lost to it."""


class MetricsRefused(TaskError):
    """The address for `/metrics` cannot be used."""


class ModelNameInvalid(TaskError):
    """A name under which no model can be served."""


class ProfileMismatch(TaskError):
    """A served name is registered with another profile; the message names both sides."""


class HeadIdTaken(TaskError):
    """Another live head answers to the same id."""


class NotAHead(TaskError):
    """A generation was delivered to a process without an engine."""


class RecordInvalid(TaskError):
    """An entry of the results stream cannot be read."""


class ParameterInvalid(TaskError):
    """A request's field is not what it should be; the message says what was expected."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        #: None: the request as such
        self.field = field
        self.message = message


class JobUnfinished(TaskError):
    """A job has not ended in the way whose result was asked for."""
