"""How the messages from tail to head are laid out in a header."""

from __future__ import annotations

import math
from typing import Any

from relay.errors import FrameInvalid
from relay.fields import MAX_ALTERNATIVES, MAX_ROWS, MAX_SECONDS, MAX_TEXT, MAX_TOKENS, Fields, pack
from relay.messages import Accepted, Error, ErrorReason, TokenLogprobs, Verdict, Void, VoidReason, Welcome
from relay.tail_figures import TailFigures


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
    rows = [_write_row(row) for row in m.rows]
    return [m.number, rows, float(m.tail_s), float(m.waited_s), _write_figures(m.figures)]


def read_verdict(f: Fields) -> Verdict:
    number = f.long("number")
    rows = tuple(_read_row(row) for row in f.array("rows", MAX_ROWS))
    return Verdict(number, rows, f.number("tail_s"), f.number("waited_s"), _read_figures(f.item()))


def _write_figures(m: TailFigures | None) -> list[Any] | None:
    if m is None:
        return None
    return [m.rows, m.tokens, float(m.compute_s), float(m.uptime_s), m.gpu_used_bytes, m.gpu_total_bytes]


def _read_figures(value: object) -> TailFigures | None:
    if value is None:
        return None
    f = Fields(value, "TailFigures", 6)
    return TailFigures(
        rows=f.long("rows"),
        tokens=f.long("tokens"),
        compute_s=f.number("compute_s", MAX_SECONDS),
        uptime_s=f.number("uptime_s", MAX_SECONDS),
        gpu_used_bytes=f.long("gpu_used_bytes"),
        gpu_total_bytes=f.long("gpu_total_bytes"),
    )


def _write_row(row: Accepted | Void) -> list[Any]:
    if isinstance(row, Void):
        return [row.slot, row.generation, row.round, str(row.reason)]
    fields = [row.slot, row.generation, row.round, row.accepted, list(row.tokens)]
    return [*fields, [_write_logprobs(each) for each in row.logprobs]] if row.logprobs else fields


def _read_row(value: object) -> Accepted | Void:
    """Told apart by their number of fields; an `Accepted` has one more where log probabilities are asked for."""
    if isinstance(value, list) and len(value) == 4:
        return _read_void(value)
    has_logprobs = isinstance(value, list) and len(value) == 6
    f = Fields(value, "Accepted", 6 if has_logprobs else 5)
    row = Accepted(
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        accepted=f.integer("accepted", 0, MAX_TOKENS),
        tokens=f.tokens("tokens"),
        logprobs=tuple(_read_logprobs(each) for each in f.array("logprobs", MAX_TOKENS)) if has_logprobs else (),
    )
    if has_logprobs and not len(row.logprobs) == len(row.tokens) > 0:
        raise FrameInvalid(f"Accepted.logprobs: {len(row.logprobs)} for {len(row.tokens)} tokens")
    return row


def _write_logprobs(m: TokenLogprobs) -> list[Any]:
    """The likeliest tokens, and all log probabilities together: the chosen token's first."""
    return [list(m.top), pack((m.chosen, *m.top_logprobs), "f", "TokenLogprobs")]


def _read_logprobs(value: object) -> TokenLogprobs:
    f = Fields(value, "TokenLogprobs", 2)
    top, values = f.tokens("top", MAX_ALTERNATIVES), f.packed("logprobs", "f", 1 + MAX_ALTERNATIVES)
    if len(values) != 1 + len(top):
        raise FrameInvalid(f"TokenLogprobs: {len(values)} values for the chosen and {len(top)} other tokens")
    if not all(math.isfinite(each) and each <= 0.0 for each in values):
        raise FrameInvalid("TokenLogprobs: expected finite numbers up to 0")
    return TokenLogprobs(values[0], top, values[1:])


def _read_void(value: object) -> Void:
    f = Fields(value, "Void", 4)
    slot, generation, number, reason = f.integer("slot"), f.long("generation"), f.long("round"), f.text("reason")
    try:
        return Void(slot, generation, number, VoidReason(reason))
    except ValueError as error:
        raise FrameInvalid(f"Void.reason: {error}") from error
