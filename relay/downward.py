"""How the messages from tail to head are laid out in a header."""

from __future__ import annotations

from typing import Any

from relay.errors import FrameInvalid
from relay.fields import MAX_ROWS, MAX_TEXT, MAX_TOKENS, Fields
from relay.messages import Accepted, Error, ErrorReason, Verdict, Void, VoidReason, Welcome


def write_welcome(m: Welcome) -> list[Any]:
    return [m.tail, m.epoch]


def read_welcome(f: Fields) -> Welcome:
    return Welcome(tail=f.text("tail"), epoch=f.long("epoch"))


def write_error(m: Error) -> list[Any]:
    return [m.epoch, str(m.reason), m.message[:MAX_TEXT]]


def read_error(f: Fields) -> Error:
    epoch, reason, text = f.long("epoch"), f.text("reason"), f.text("message", MAX_TEXT)
    try:
        return Error(epoch, ErrorReason(reason), text)
    except ValueError as error:
        raise FrameInvalid(f"Error.reason: {error}") from error


def write_verdict(m: Verdict) -> list[Any]:
    return [m.number, [_write_row(row) for row in m.rows], float(m.tail_s), float(m.waited_s)]


def read_verdict(f: Fields) -> Verdict:
    number = f.long("number")
    rows = tuple(_read_row(row) for row in f.array("rows", MAX_ROWS))
    return Verdict(number, rows, f.number("tail_s"), f.number("waited_s"))


def _write_row(row: Accepted | Void) -> list[Any]:
    if isinstance(row, Void):
        return [row.slot, row.generation, row.round, str(row.reason)]
    return [row.slot, row.generation, row.round, row.accepted, list(row.tokens)]


def _read_row(value: object) -> Accepted | Void:
    """Told apart by their number of fields."""
    if isinstance(value, list) and len(value) == 4:
        return _read_void(value)
    f = Fields(value, "Accepted", 5)
    return Accepted(
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        accepted=f.integer("accepted", 0, MAX_TOKENS),
        tokens=f.tokens("tokens"),
    )


def _read_void(value: object) -> Void:
    f = Fields(value, "Void", 4)
    slot, generation, number, reason = f.integer("slot"), f.long("generation"), f.long("round"), f.text("reason")
    try:
        return Void(slot, generation, number, VoidReason(reason))
    except ValueError as error:
        raise FrameInvalid(f"Void.reason: {error}") from error
