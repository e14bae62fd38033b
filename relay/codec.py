"""Messages to bytes and back. No pickle, no torch; whatever arrives is checked before anyone sees it.

A frame is

    byte 0       format version
    bytes 1–3    zero
    bytes 4–7    length of the header, unsigned little-endian
    header       msgpack array: [kind, field, field, …], nested records as arrays
    padding      zeros up to a multiple of 16, so that tensor bytes stay aligned
    tensor       the one tensor that the kind carries, if any: raw bytes, or what `relay.shrink` made of them

`relay.upward`, `relay.downward` and `relay.samplings` lay out the fields, `relay.tensors` the tensor, which the last
field of its kind's header describes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from relay import downward, upward
from relay.errors import FrameInvalid
from relay.fields import MAX_ROWS, Fields
from relay.messages import DTYPE_BYTES, FRAME_VERSION, Error, Hello, Message, Prefill, Release, Round, Verdict, Welcome
from relay.shrink import shrink
from relay.tensors import describe, raw, read_tensor

VERSION = FRAME_VERSION
#: bytes; the largest frame that either side accepts unless told otherwise
MAX_FRAME_BYTES = 64 << 20
#: bytes of a frame's header
MAX_HEADER_BYTES = 1 << 20

_PREFIX = struct.Struct("<B3xI")
_ALIGNMENT = 16


def encode(message: Message, max_bytes: int = MAX_FRAME_BYTES, *, compress: bool = False) -> bytes:
    """`message` as a frame, its tensor shrunk if `compress` and if that helps; the frame says so itself.

    Raises `FrameInvalid` where `decode` would refuse the result.
    """
    number = _KIND_OF[type(message)]
    fields, body = [number, *_KINDS[number].write(message)], memoryview(b"")
    tensor = message.hidden if isinstance(message, Prefill | Round) else None
    if tensor is not None:
        fields, body = [*fields, describe(tensor)], raw(tensor)
    _read_message(fields, body, max_bytes)
    if tensor is not None and compress:
        num_deflated, body = shrink(body, DTYPE_BYTES[tensor.dtype])
        fields[-1] = describe(tensor, num_deflated)
    header = msgpack.packb(fields)
    start = _PREFIX.size + len(header)
    padding = bytes(-start % _ALIGNMENT)
    num_bytes = start + len(padding) + body.nbytes
    if len(header) > MAX_HEADER_BYTES or num_bytes > max_bytes:
        raise FrameInvalid(
            f"{type(message).__name__} of {num_bytes} bytes exceeds the frame limit of {max_bytes}, or its header of "
            f"{len(header)} that of {MAX_HEADER_BYTES}"
        )
    return b"".join((_PREFIX.pack(VERSION, len(header)), header, padding, body))


def decode(data: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES) -> Message:
    """The message of a frame; its tensor, unless shrunk, is a view into `data`. Raises `FrameInvalid`, nothing else."""
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
    return _read_message(_unpack(view[_PREFIX.size : end]), view[body_start:], max_bytes)


def _unpack(header: memoryview) -> object:
    try:
        return msgpack.unpackb(header, max_array_len=MAX_ROWS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise FrameInvalid(f"header is not msgpack: {error}") from error


def _read_message(header: object, body: memoryview, max_bytes: int) -> Message:
    if not isinstance(header, list) or not header:
        raise FrameInvalid("header is not a list that starts with a kind")
    number, *items = header
    kind = _KINDS.get(number) if type(number) is int else None
    if kind is None:
        raise FrameInvalid(f"unknown kind {str(number)[:40]}")
    name = kind.message.__name__
    if not kind.has_tensor:
        if body.nbytes:
            raise FrameInvalid(f"{name} carries {body.nbytes} bytes after its header")
        return kind.read(Fields(items, name, kind.num_fields))
    fields = Fields(items[:-1], name, kind.num_fields)
    return kind.read(fields, read_tensor(items[-1], body, max_bytes))


class _Kind(NamedTuple):
    """How one kind of message is laid out."""

    message: type[Message]
    #: without the tensor's description
    num_fields: int
    has_tensor: bool
    write: Callable[[Any], list[Any]]
    #: from the fields and, if the kind has one, the tensor
    read: Callable[..., Message]


#: kind number on the wire → layout; a number is never used again for another layout within a version
_KINDS = {
    1: _Kind(Hello, 7, False, upward.write_hello, upward.read_hello),
    2: _Kind(Prefill, 10, True, upward.write_prefill, upward.read_prefill),
    3: _Kind(Round, 2, True, upward.write_round, upward.read_round),
    4: _Kind(Release, 4, False, upward.write_release, upward.read_release),
    17: _Kind(Welcome, 2, False, downward.write_welcome, downward.read_welcome),
    18: _Kind(Verdict, 5, False, downward.write_verdict, downward.read_verdict),
    19: _Kind(Error, 3, False, downward.write_error, downward.read_error),
}
_KIND_OF = {kind.message: number for number, kind in _KINDS.items()}
