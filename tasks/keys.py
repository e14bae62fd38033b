"""Every key on the queue server."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.generation import known_versions

#: stream of `started` and `outcome` records on their way to the database
RESULTS = "shardq:results"
#: records nobody could read, kept for a look
REJECTED = "shardq:results:rejected"
#: outcomes of jobs that the bookkeeper's database does not have, kept until somebody who has them takes them
UNKNOWN = "shardq:results:unknown"
#: the consumer group and its only consumer
RESULTS_GROUP = "bookkeeper"
#: set of the ids of all heads that may own unacknowledged messages
HEADS = "shardq:heads"
#: hash: served name → profile as JSON
MODELS = "shardq:models"
#: lease of the one working bookkeeper
BOOKKEEPER = "shardq:bookkeeper"
#: which database the bookkeeper writes, as JSON; it stays when none is at work
DATABASE = "shardq:database"

#: version of the shardq that keeps the books; stands for ten minutes after it was last there. It has its name among the
#: attempts' keys because a head may read none of the others that the bookkeeper writes
HOST = "shardq:job:host"

#: hash: task id → why the attempt shall end before its text does
STOPS = "shardq:stops"

#: stands in the unacknowledged keys of a consumer that is no head
NO_HEAD = "no-head"
#: message priorities; 0 is served first
PRIORITIES = tuple(range(10))
#: between a queue's name and its priority
SEPARATOR = ":"


def queue(model: str, version: int = 1) -> str:
    """The Celery queue of a served name's tasks of one version: a head takes from those that it can read."""
    return of_version(f"shardq.{model}", version)


def of_version(queue_name: str, version: int) -> str:
    """The queue with a later version of what stands in this one."""
    return queue_name if version == 1 else f"{queue_name}{SEPARATOR}v{version}"


def queue_of(name: str) -> str:
    """The served name's queue that a list, or the queue of a later version, belongs to."""
    return name.partition(SEPARATOR)[0]


def ready(model: str, priority: int = PRIORITIES[-1], versions: Iterable[int] | None = None) -> list[str]:
    """The lists that hold a served name's waiting messages, first served first, up to those of `priority`.

    Of all versions, or of these. A higher priority comes first, whatever the version; then what fewer heads can take.
    """
    return ready_lists(queue(model), known_versions() if versions is None else versions, priority)


def ready_lists(queue_name: str, versions: Iterable[int], priority: int = PRIORITIES[-1]) -> list[str]:
    """As `ready`, by the name of the queue."""
    names = [of_version(queue_name, version) for version in sorted(versions, reverse=True)]
    return [ready_at(name, urgency) for urgency in PRIORITIES[: priority + 1] for name in names]


def ready_at(queue_name: str, priority: int) -> str:
    """The list of one queue and priority, named as kombu does."""
    return f"{queue_name}{SEPARATOR}{priority}" if priority else queue_name


def bell(queue_name: str) -> str:
    """Stream with one entry that is replaced whenever messages come into a queue."""
    return f"{queue_name}{SEPARATOR}bell"


def job(task_id: str) -> str:
    """A job attempt's admission lease while it runs, its done marker afterwards."""
    return f"shardq:job:{task_id}"


def tries(task_id: str) -> str:
    """Set of the engine instances that were given a job attempt."""
    return f"shardq:tries:{task_id}"


def follow(task_id: str) -> str:
    """Stands, and lapses, as long as somebody follows a job attempt's text; its value changes with whoever begins."""
    return f"shardq:follow:{task_id}"


def followed_text(task_id: str) -> str:
    """Stream of what was committed of a followed text; it lapses."""
    return f"shardq:text:{task_id}"


def head(head_id: str) -> str:
    """A head's presence."""
    return f"shardq:head:{head_id}"


def unacked(head_id: str | None) -> str:
    """Hash: delivery tag → message taken but not acknowledged by this head's fronts."""
    return f"shardq:{head_id or NO_HEAD}.unacked"


def unacked_index(head_id: str | None) -> str:
    """Sorted set: delivery tag by the time it was taken or last refreshed."""
    return f"{unacked(head_id)}_index"


def unacked_mutex(head_id: str | None) -> str:
    """Lock of kombu's own restoring."""
    return f"{unacked(head_id)}_mutex"
