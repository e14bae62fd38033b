"""What to do about an error that another package raised: the end of its line."""

from __future__ import annotations

#: class of the error → the next step
_STEPS = {
    "BatchNotFound": "`shardq list` shows the batches",
    "BatchAmbiguous": "give more of the id",
    "JobNotFound": "jobs are BATCH-LINE: `shardq results BATCH --format table` shows them",
    "BatchOpen": "wait for its end, or stop it with `shardq cancel BATCH`",
    "BatchIncomplete": "`shardq delete BATCH`, then submit the file again",
    "NameTaken": "submit under another --name",
    "BatchEmpty": "give the file at least one prompt",
    "SubmissionSuperseded": "submit the file again",
    "DatabaseBusy": "do it again; `fuser` names who holds the file",
    "DiskFull": "`shardq prune --older-than 30d` deletes what is old",
    "DatabaseUnavailable": "look at SHARDQ_DATABASE_URL, or run `shardq doctor`",
}


def with_next_step(message: str, kind: type) -> str:
    """The message of an error of this class, and what to do next where it does not say so itself.

    Messages that name a command, a variable or an option already say enough.
    """
    step = next((_STEPS[base.__name__] for base in kind.__mro__ if base.__name__ in _STEPS), None)
    if step is None or any(sign in message for sign in ("`", "SHARDQ_", "--")):
        return message
    return f"{message} ({step})"
