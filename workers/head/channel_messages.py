"""What engine and fronts say to each other on the local socket: msgpack arrays led by a kind, no objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from tasks.generation import GenerationTask, Outcome
from workers.errors import WorkerError

#: largest message either side accepts, in bytes: a prompt or a text of a very long context, with room
MAX_MESSAGE_BYTES = 64 << 20


class MessageInvalid(WorkerError):
    """The bytes are no message of this channel."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Front to engine: a delivery of this task waits here for its end."""

    task: GenerationTask
    #: engines died over this task before: it must not take others with it
    suspect: bool


@dataclass(frozen=True, slots=True)
class Consuming:
    """Engine to front: whether to take messages from the queue."""

    on: bool


@dataclass(frozen=True, slots=True)
class Started:
    """Engine to front: the task got a slot."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Engine to front: completion tokens so far and the current decode rate (None without an interval)."""

    task_id: str
    num_tokens: int
    tps: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Engine to front: the end of the task."""

    task_id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class HandedBack:
    """Engine to front: the engine gives the task up unfinished; its message goes back to the queue."""

    task_id: str


ToEngine = Submit
ToFront = Consuming | Started | Progress | Finished | HandedBack


def encode(message: ToEngine | ToFront) -> bytes:
    """This message as bytes."""
    packed: bytes = msgpack.packb(_fields(message))
    return packed


def decode_to_engine(data: bytes) -> ToEngine:
    """The front's message in `data`; raises `MessageInvalid`."""
    match _unpack(data):
        case ["submit", dict() as task, bool(suspect)]:
            return Submit(_task(task), suspect)
    raise MessageInvalid("not a front's message")


def decode_to_front(data: bytes) -> ToFront:
    """The engine's message in `data`; raises `MessageInvalid`."""
    match _unpack(data):
        case ["consuming", bool(on)]:
            return Consuming(on)
        case ["started", str(task_id)]:
            return Started(task_id)
        case ["progress", str(task_id), int(num_tokens), float() | None as tps] if type(num_tokens) is int:
            return Progress(task_id, num_tokens, tps)
        case ["finished", str(task_id), dict() as outcome]:
            return Finished(task_id, _outcome(outcome))
        case ["handed_back", str(task_id)]:
            return HandedBack(task_id)
    raise MessageInvalid("not an engine's message")


def _fields(message: ToEngine | ToFront) -> list[Any]:
    match message:
        case Submit(task, suspect):
            return ["submit", task.to_json(), suspect]
        case Consuming(on):
            return ["consuming", on]
        case Started(task_id):
            return ["started", task_id]
        case Progress(task_id, num_tokens, tps):
            return ["progress", task_id, num_tokens, tps]
        case Finished(task_id, outcome):
            return ["finished", task_id, outcome.to_json()]
        case HandedBack(task_id):
            return ["handed_back", task_id]


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageInvalid(f"not msgpack: {error}") from error


def _task(value: dict[str, Any]) -> GenerationTask:
    try:
        return GenerationTask.from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageInvalid(f"not a task: {error}") from error


def _outcome(value: dict[str, Any]) -> Outcome:
    try:
        return Outcome.from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageInvalid(f"not an outcome: {error}") from error
