"""Messages to bytes and back. No pickle, no torch; whatever arrives is checked before anyone sees it.

A frame is

    byte 0       format version
    bytes 1–3    zero
    bytes 4–7    length of the header, unsigned little-endian
    header       msgpack array: [kind, field, field, …], nested records as arrays
    padding      zeros up to a multiple of 16, so that tensor bytes stay aligned
    tensor       raw bytes of the one tensor that the kind carries, if any
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgpack

from relay.errors import FrameInvalid
from relay.messages import (
    DTYPE_BYTES,
    Accepted,
    Copy,
    Draft,
    Error,
    ErrorReason,
    Hello,
    Message,
    Prefill,
    Release,
    Round,
    Sampling,
    Tensor,
    Verdict,
    Void,
    VoidReason,
    Welcome,
)
from relay.profile import Profile

VERSION = 1
#: bytes; the largest frame that either side accepts unless told otherwise
MAX_FRAME_BYTES = 64 << 20
#: bytes of a frame's header
MAX_HEADER_BYTES = 1 << 20
MAX_LANES = 64
#: rows of a round or a verdict
MAX_ROWS = 4096
#: drafted tokens of a row, tokens of a verdict
MAX_TOKENS = 1024
#: characters of ids, names and digests
MAX_NAME = 256
#: characters of an error's text
MAX_TEXT = 16384

_PREFIX = struct.Struct("<B3xI")
_ALIGNMENT = 16
_INT31 = 2**31 - 1
_INT63 = 2**63 - 1


def encode(message: Message, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """`message` as a frame. Raises `FrameInvalid` where `decode` would refuse the result."""
    kind = _KIND_OF[type(message)]
    tensor = message.hidden if isinstance(message, Prefill | Round) else None
    body = _raw(tensor) if tensor is not None else memoryview(b"")
    fields = [kind, *_KINDS[kind].write(message)]
    _read_message(fields, body)
    header = msgpack.packb(fields)
    start = _PREFIX.size + len(header)
    padding = bytes(-start % _ALIGNMENT)
    num_bytes = start + len(padding) + body.nbytes
    if len(header) > MAX_HEADER_BYTES or num_bytes > max_bytes:
        raise FrameInvalid(f"{type(message).__name__} of {num_bytes} bytes exceeds the frame limit of {max_bytes}")
    return b"".join((_PREFIX.pack(VERSION, len(header)), header, padding, body))


def decode(data: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES) -> Message:
    """The message of a frame; its tensor is a view into `data`. Raises `FrameInvalid`, and nothing else."""
    view = memoryview(data)
    if view.nbytes > max_bytes:
        raise FrameInvalid(f"frame of {view.nbytes} bytes exceeds the limit of {max_bytes}")
    if view.nbytes < _PREFIX.size:
        raise FrameInvalid(f"frame of {view.nbytes} bytes is shorter than its prefix")
    version, header_bytes = _PREFIX.unpack_from(view)
    if version != VERSION:
        raise FrameInvalid(f"frame version {version}, expected {VERSION}")
    end = _PREFIX.size + header_bytes
    body_start = end + -end % _ALIGNMENT
    if header_bytes > MAX_HEADER_BYTES or body_start > view.nbytes:
        raise FrameInvalid(f"header of {header_bytes} bytes in a frame of {view.nbytes}")
    return _read_message(_unpack(view[_PREFIX.size : end]), view[body_start:])


def _unpack(header: memoryview) -> object:
    try:
        return msgpack.unpackb(header, max_array_len=MAX_ROWS, max_map_len=0, max_bin_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise FrameInvalid(f"header is not msgpack: {error}") from error


def _read_message(header: object, body: memoryview) -> Message:
    if not isinstance(header, list) or not header:
        raise FrameInvalid("header is not a list that starts with a kind")
    number = header[0]
    kind = _KINDS.get(number) if type(number) is int else None
    if kind is None:
        raise FrameInvalid(f"unknown kind {str(number)[:40]}")
    fields = _Fields(header[1:], kind.message.__name__, kind.num_fields)
    if not kind.has_tensor and body.nbytes:
        raise FrameInvalid(f"{kind.message.__name__} carries {body.nbytes} bytes after its header")
    return kind.read(fields, body)


class _Fields:
    """Takes the items of one msgpack array in order and checks each; raises `FrameInvalid`."""

    def __init__(self, value: object, where: str, count: int) -> None:
        if not isinstance(value, list) or len(value) != count:
            raise FrameInvalid(f"{where}: expected {count} fields")
        self._items = iter(value)
        self._where = where

    def integer(self, name: str, low: int = 0, high: int = _INT31) -> int:
        value = next(self._items)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def long(self, name: str) -> int:
        return self.integer(name, 0, _INT63)

    def number(self, name: str, high: float = math.inf) -> float:
        value = next(self._items)
        if type(value) is not float or not math.isfinite(value) or not 0.0 <= value <= high:
            raise self._wrong(name, value, f"a finite number from 0 to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = next(self._items)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, limit: int = MAX_NAME) -> str:
        value = next(self._items)
        if type(value) is not str or len(value) > limit:
            raise self._wrong(name, value, f"a text of at most {limit} characters")
        return value

    def array(self, name: str, limit: int) -> list[object]:
        value = next(self._items)
        if not isinstance(value, list) or len(value) > limit:
            raise self._wrong(name, value, f"a list of at most {limit} items")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        values = self.array(name, MAX_TOKENS)
        # the bulk of a header: one loop instead of a call per token
        if not all(type(value) is int and 0 <= value <= _INT31 for value in values):
            raise FrameInvalid(f"{self._where}.{name}: expected integers from 0 to {_INT31}")
        return cast("tuple[int, ...]", tuple(values))

    def item(self) -> object:
        return next(self._items)

    def _wrong(self, name: str, value: object, expected: str) -> FrameInvalid:
        return FrameInvalid(f"{self._where}.{name}: expected {expected}, got {type(value).__name__} {str(value)[:40]}")


def _raw(tensor: Tensor) -> memoryview:
    try:
        return memoryview(tensor.data).cast("B")
    except (TypeError, ValueError) as error:
        raise FrameInvalid(f"tensor data must be C-contiguous bytes: {error}") from error


def _write_tensor(tensor: Tensor) -> list[Any]:
    return [tensor.dtype, list(tensor.shape)]


def _read_tensor(value: object, body: memoryview) -> Tensor:
    """A matrix: every tensor on the wire is [tokens, hidden]."""
    fields = _Fields(value, "Tensor", 2)
    dtype = fields.text("dtype")
    if dtype not in DTYPE_BYTES:
        raise FrameInvalid(f"Tensor.dtype: {dtype[:40]!r} is none of {', '.join(DTYPE_BYTES)}")
    shape = _Fields(fields.array("shape", 2), "Tensor.shape", 2)
    rows, columns = shape.integer("rows", 1), shape.integer("columns", 1)
    if rows * columns * DTYPE_BYTES[dtype] != body.nbytes:
        raise FrameInvalid(f"Tensor: {dtype} [{rows}, {columns}] does not fit {body.nbytes} bytes")
    return Tensor(dtype, (rows, columns), body)


def _write_profile(profile: Profile) -> list[Any]:
    p = profile
    return [p.fingerprint, p.dtype, p.quantization, p.wire_dtype, p.deterministic, p.context]


def _read_profile(value: object) -> Profile:
    f = _Fields(value, "Profile", 6)
    return Profile(
        fingerprint=f.text("fingerprint"),
        dtype=f.text("dtype"),
        quantization=f.text("quantization"),
        wire_dtype=f.text("wire_dtype"),
        deterministic=f.flag("deterministic"),
        context=f.integer("context"),
    )


def _write_hello(m: Hello) -> list[Any]:
    return [m.head, m.epoch, m.lanes, _write_profile(m.profile), m.split, m.slots, m.max_query]


def _read_hello(f: _Fields, _: memoryview) -> Hello:
    return Hello(
        head=f.text("head"),
        epoch=f.long("epoch"),
        lanes=f.integer("lanes", 1, MAX_LANES),
        profile=_read_profile(f.item()),
        split=f.integer("split"),
        slots=f.integer("slots"),
        max_query=f.integer("max_query"),
    )


def _write_welcome(m: Welcome) -> list[Any]:
    return [m.tail, m.epoch]


def _read_welcome(f: _Fields, _: memoryview) -> Welcome:
    return Welcome(tail=f.text("tail"), epoch=f.long("epoch"))


def _write_error(m: Error) -> list[Any]:
    return [m.epoch, str(m.reason), m.message[:MAX_TEXT]]


def _read_error(f: _Fields, _: memoryview) -> Error:
    epoch, reason, text = f.long("epoch"), f.text("reason"), f.text("message", MAX_TEXT)
    try:
        return Error(epoch, ErrorReason(reason), text)
    except ValueError as error:
        raise FrameInvalid(f"Error.reason: {error}") from error


def _write_sampling(s: Sampling) -> list[Any]:
    return [float(s.temperature), s.top_k, float(s.top_p), float(s.min_p), s.seed]


def _read_sampling(value: object) -> Sampling:
    f = _Fields(value, "Sampling", 5)
    return Sampling(
        temperature=f.number("temperature"),
        top_k=f.integer("top_k"),
        top_p=f.number("top_p", 1.0),
        min_p=f.number("min_p", 1.0),
        seed=f.integer("seed", -_INT63 - 1, _INT63),
    )


def _write_copy(copy: Copy | None) -> list[Any] | None:
    return None if copy is None else [copy.slot, copy.generation, copy.length]


def _read_copy(value: object) -> Copy | None:
    if value is None:
        return None
    f = _Fields(value, "Copy", 3)
    return Copy(slot=f.integer("slot"), generation=f.long("generation"), length=f.integer("length"))


def _write_prefill(m: Prefill) -> list[Any]:
    return [
        *(m.number, m.slot, m.generation, m.round, m.position, m.token, m.last),
        _write_sampling(m.sampling),
        _write_copy(m.copy),
        _write_tensor(m.hidden),
    ]


def _read_prefill(f: _Fields, body: memoryview) -> Prefill:
    return Prefill(
        number=f.long("number"),
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        position=f.integer("position"),
        token=f.integer("token"),
        last=f.flag("last"),
        sampling=_read_sampling(f.item()),
        copy=_read_copy(f.item()),
        hidden=_read_tensor(f.item(), body),
    )


def _write_round(m: Round) -> list[Any]:
    rows = [[r.slot, r.generation, r.round, r.position, r.token, list(r.draft)] for r in m.rows]
    return [m.number, rows, _write_tensor(m.hidden)]


def _read_draft(value: object) -> Draft:
    f = _Fields(value, "Draft", 6)
    return Draft(
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        position=f.integer("position"),
        token=f.integer("token"),
        draft=f.tokens("draft"),
    )


def _read_round(f: _Fields, body: memoryview) -> Round:
    number = f.long("number")
    rows = tuple(_read_draft(row) for row in f.array("rows", MAX_ROWS))
    hidden = _read_tensor(f.item(), body)
    packed = sum(1 + len(row.draft) for row in rows)
    if hidden.shape[0] != packed:
        raise FrameInvalid(f"Round.hidden: {hidden.shape[0]} rows, but its drafts need {packed}")
    return Round(number, rows, hidden)


def _write_release(m: Release) -> list[Any]:
    return [m.number, m.slot, m.generation, m.round]


def _read_release(f: _Fields, _: memoryview) -> Release:
    return Release(f.long("number"), f.integer("slot"), f.long("generation"), f.long("round"))


def _write_row(row: Accepted | Void) -> list[Any]:
    if isinstance(row, Void):
        return [row.slot, row.generation, row.round, str(row.reason)]
    return [row.slot, row.generation, row.round, row.accepted, list(row.tokens)]


def _read_row(value: object) -> Accepted | Void:
    """Told apart by their number of fields."""
    if isinstance(value, list) and len(value) == 4:
        f = _Fields(value, "Void", 4)
        slot, generation, number, reason = (
            f.integer("slot"),
            f.long("generation"),
            f.long("round"),
            f.text("reason"),
        )
        try:
            return Void(slot, generation, number, VoidReason(reason))
        except ValueError as error:
            raise FrameInvalid(f"Void.reason: {error}") from error
    f = _Fields(value, "Accepted", 5)
    return Accepted(
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        accepted=f.integer("accepted", 0, MAX_TOKENS),
        tokens=f.tokens("tokens"),
    )


def _write_verdict(m: Verdict) -> list[Any]:
    return [m.number, [_write_row(row) for row in m.rows], float(m.tail_s), float(m.waited_s)]


def _read_verdict(f: _Fields, _: memoryview) -> Verdict:
    number = f.long("number")
    rows = tuple(_read_row(row) for row in f.array("rows", MAX_ROWS))
    return Verdict(number, rows, f.number("tail_s"), f.number("waited_s"))


class _Kind(NamedTuple):
    """How one kind of message is laid out."""

    message: type[Message]
    num_fields: int
    has_tensor: bool
    write: Callable[[Any], list[Any]]
    read: Callable[[_Fields, memoryview], Message]


#: kind number on the wire → layout; a number is never used again for another layout within a version
_KINDS = {
    1: _Kind(Hello, 7, False, _write_hello, _read_hello),
    2: _Kind(Prefill, 10, True, _write_prefill, _read_prefill),
    3: _Kind(Round, 3, True, _write_round, _read_round),
    4: _Kind(Release, 4, False, _write_release, _read_release),
    17: _Kind(Welcome, 2, False, _write_welcome, _read_welcome),
    18: _Kind(Verdict, 4, False, _write_verdict, _read_verdict),
    19: _Kind(Error, 3, False, _write_error, _read_error),
}
_KIND_OF = {kind.message: number for number, kind in _KINDS.items()}
