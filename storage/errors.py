"""What can go wrong in storage.

StorageError
├── DatabaseUrlInvalid      the address is none we can open
├── DriverMissing           the address needs a package that is not installed
├── DatabaseUnavailable     unreachable, not writable, not a database
│   ├── DatabaseBusy        another process held the write lock too long
│   └── DiskFull            no room for what was to be written
├── BackupFailed            no backup was made
├── RestoreFailed           a backup was not put in the place of the database
├── SchemaInvalid           the database holds tables that are not ours
│   └── SchemaTooNew        written by a newer shardq
├── NameTaken               another batch has this name
├── SubmissionSuperseded    a later submission took this batch over, or it is published already
├── BatchEmpty              a batch without a job cannot be published
├── JobExists               a line number or custom_id is already in the batch
├── BatchOpen               the batch has not ended
├── BatchEnded              the batch has ended already
├── BatchIncomplete         the batch was cancelled before its file was written
├── BatchNotFound
│   └── BatchAmbiguous      the prefix fits several batches
├── JobNotFound
└── FilterInvalid           a filter names no column, or a value it cannot have
"""

from __future__ import annotations

from collections.abc import Sequence


class StorageError(Exception):
    """Base of every error this package raises; its text is one line, fit to be shown to a user."""


class DatabaseUrlInvalid(StorageError):
    """The database address cannot be used."""


class DriverMissing(StorageError):
    """The database address needs a Python package that is not installed."""


class DatabaseUnavailable(StorageError):
    """The database cannot be reached, read or written right now."""


class DatabaseBusy(DatabaseUnavailable):
    """Another process kept the write lock for longer than the busy timeout; trying again is safe."""


class DiskFull(DatabaseUnavailable):
    """There was no room for what was to be written; nothing of it was."""


class BackupFailed(StorageError):
    """No backup was made; nothing was left at its place."""


class RestoreFailed(StorageError):
    """A backup was not put in the place of the database, which is as it was."""


class SchemaInvalid(StorageError):
    """The database holds tables with our names, but no schema version."""


class SchemaTooNew(SchemaInvalid):
    """The database was written by a newer shardq."""

    def __init__(self, where: str, found: int, supported: int) -> None:
        super().__init__(
            f"{where} has schema version {found}, this shardq knows versions up to {supported}: "
            "upgrade shardq, or use the backup made before the database was upgraded"
        )
        self.found = found
        self.supported = supported


class NameTaken(StorageError):
    """A batch of this name exists with another content."""

    def __init__(self, name: str, batch_id: str, difference: str, *, can_be_retried: bool = True) -> None:
        super().__init__(f"the name {name!r} belongs to {batch_id}, which has {difference}")
        self.name = name
        self.batch_id = batch_id
        self.can_be_retried = can_be_retried


class SubmissionSuperseded(StorageError):
    """This submission may no longer write to its batch."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"{batch_id} was published, discarded or taken over by another submission")
        self.batch_id = batch_id


class BatchEmpty(StorageError):
    """There is no job to publish."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"{batch_id} holds no job: nothing to publish")
        self.batch_id = batch_id


class JobExists(StorageError):
    """A job's line number or custom_id is already in its batch."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"a line number or custom_id was given twice in {batch_id}")
        self.batch_id = batch_id


class BatchOpen(StorageError):
    """The batch has not ended, which this needs."""

    def __init__(self, batch_id: str, status: str) -> None:
        super().__init__(f"{batch_id} has not ended: it is {status}")
        self.batch_id = batch_id
        self.status = status


class BatchEnded(StorageError):
    """The batch has ended: nothing of it can be stopped."""

    def __init__(self, batch_id: str, status: str) -> None:
        super().__init__(f"{batch_id} has ended: it is {status}")
        self.batch_id = batch_id
        self.status = status


class BatchIncomplete(StorageError):
    """Only a part of the file was written before the batch was cancelled: it cannot be run."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"{batch_id} was cancelled before all of its file was written: it cannot be run")
        self.batch_id = batch_id


class BatchNotFound(StorageError):
    """No batch has this id, name or id prefix."""

    def __init__(self, reference: str) -> None:
        super().__init__(f"no batch {reference!r}: expected an id, the beginning of one, or a name")
        self.reference = reference


class BatchAmbiguous(BatchNotFound):
    """Several ids begin with the given prefix."""

    def __init__(self, reference: str, candidates: Sequence[str]) -> None:
        StorageError.__init__(self, f"{reference!r} fits several batches: {', '.join(candidates)}")
        self.reference = reference
        self.candidates = tuple(candidates)


class JobNotFound(StorageError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {job_id!r}")
        self.job_id = job_id


class FilterInvalid(StorageError):
    """A filter that nobody can apply; the text says what was expected."""
