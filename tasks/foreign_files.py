"""Files that hold no lines of ours, known by their beginning: named once for what they are, instead of line by line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

#: lines, and bytes, by which a file is judged
SAMPLE_LINES = 20
SAMPLE_BYTES = 1 << 18

#: first bytes → what such a file is, and what makes lines of it
_MAGIC = {
    b"\x1f\x8b": "is a gzip archive: unpack it with `gunzip`",
    b"PK\x03\x04": "is a zip archive, as xlsx files are: unpack it, or export it as one JSON object a line",
    b"BZh": "is a bzip2 archive: unpack it with `bunzip2`",
    b"\xfd7zXZ\x00": "is an xz archive: unpack it with `unxz`",
    b"\x28\xb5\x2f\xfd": "is a zstd archive: unpack it with `unzstd`",
    b"PAR1": 'is a parquet file: expected one JSON object a line, as pandas writes with `orient="records", lines=True`',
}
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
#: JSON begins with two characters of ASCII: where the zeros are in the first four bytes, without a mark → the encoding
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
#: how the second line of an object over several lines begins
_CONTINUATIONS = (b" ", b"\t", b'"', b"}", b"]", b"[")
_EXPECTED = "expected one JSON object a line"


def foreign(lines: Sequence[bytes]) -> str | None:
    """What the file that begins with these lines, none blank, is instead; None if it can be read line by line."""
    if not lines:
        return None
    return _by_first_bytes(lines[0]) or _by_shape(lines) or _by_fields(lines)


def _by_first_bytes(first: bytes) -> str | None:
    for magic, what in _MAGIC.items():
        if first.startswith(magic):
            return what
    for mark, encoding in _MARKS.items():
        if first.startswith(mark):
            return _recode(encoding)
    encoding = _ZEROS.get(tuple(byte == 0 for byte in first[:4]), "")
    return _recode(encoding) if encoding else None


def _recode(encoding: str) -> str:
    return f"is {encoding}, expected UTF-8: convert it with `iconv -f {encoding} -t UTF-8`"


def _by_shape(lines: Sequence[bytes]) -> str | None:
    """Whether these are parts of one document, or no JSON at all."""
    first, second = lines[0].strip(), lines[1] if len(lines) > 1 else b""
    if first.startswith(b"[") and (not second or _is_cut_off(first)):
        return f"is one JSON list: {_EXPECTED}, as `jq -c '.[]'` makes them"
    if first.startswith(b"{") and second[:1] in _CONTINUATIONS and _is_cut_off(first):
        return f"has one object over several lines: {_EXPECTED}, as `jq -c .` makes them"
    if len(lines) < 2 or any(line.lstrip()[:1] in (b"{", b"[") for line in lines):
        return None
    looks = "csv" if all(b"," in line or b"\t" in line or b";" in line for line in lines) else "plain text"
    return f'looks like {looks}: {_EXPECTED}, as {{"prompt": …}}'


def _is_cut_off(line: bytes) -> bool:
    """Whether the line is the beginning of some JSON that goes on behind it."""
    text = line.decode(errors="replace")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except (ValueError, RecursionError):
        return False
    return False


def _by_fields(lines: Sequence[bytes]) -> str | None:
    """Whether every line is one for another service."""
    kinds = {_service(line) for line in lines}
    return kinds.pop() if len(kinds) == 1 else None


def _service(line: bytes) -> str | None:
    if not any(name in line for name in (b'"params"', b'"contents"')):
        return None  # a line may have megabytes: look before it is parsed
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() & {"prompt", "messages", "body"}:
        return None
    if _is_object(value, "params", "messages"):
        return (
            "holds lines for Anthropic's batches: expected body in the place of params, with a system text as its "
            "first message"
        )
    if _is_object(value, "request", "contents") or "contents" in value:
        return (
            "holds lines for Gemini's batches: expected custom_id and messages, each with role and content, in the "
            "place of key and contents"
        )
    return None


def _is_object(value: dict[str, Any], name: str, inner: str) -> bool:
    found = value.get(name)
    return isinstance(found, dict) and inner in found
