"""What is submitted, as a file of lines: a path, prompts and requests one by one, a DataFrame, an open file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

from cli.client.input_file import open_file, spooled
from cli.client.voice import Voice
from cli.errors import InputRefused, Refused
from tasks.openai_batch import is_field
from tasks.openai_parameters import what_is_unknown

if TYPE_CHECKING:
    import pandas


@runtime_checkable
class Readable(Protocol):
    """An open file of texts or bytes, whatever has wrapped it: not all that do are of `io`."""

    def read(self, size: int, /) -> str | bytes:
        """As much as that, or nothing at the end."""


#: a file's path; an open file; a DataFrame with a column for each field; or prompts (texts), chats (lists of messages)
#: and requests (the object of a line) one after the other
Source = str | Path | Readable | Iterable[Any]

#: rows of a DataFrame that are made into lines at a time
_ROWS = 1000
#: characters or bytes of an open file that are read at a time
_CHUNK = 1 << 20


def opened(source: Source, voice: Voice) -> AbstractContextManager[BinaryIO]:
    """The source as a stream of lines that can be rewound. Raises InputRefused, Refused.

    Everything but a file is written to a temporary one first, an item at a time: it is read twice.
    """
    if isinstance(source, str) and not _exists(source):
        raise Refused(f"no file {source[:80]!r}: a text is a path; put prompts into a list, a single one, too")
    if isinstance(source, str | Path):
        return open_file(Path(source).expanduser(), voice)
    return spooled(_lines(source), voice)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except OSError:
        return False  # longer than any name may be


def _lines(source: Readable | Iterable[Any]) -> Iterator[bytes]:
    if isinstance(source, Readable):
        while chunk := source.read(_CHUNK):
            # half a surrogate pair is no UTF-8 then either: its line is refused by its number
            yield chunk.encode(errors="surrogatepass") if isinstance(chunk, str) else chunk
        return
    if isinstance(source, Mapping):
        raise InputRefused("expected several prompts or requests: put the one into a list")
    if not isinstance(source, Iterable):
        raise InputRefused(f"expected a path, an open file, a DataFrame or prompts, got {type(source).__name__}")
    items = _rows(source) if _is_frame(source) else source
    for number, item in enumerate(items, start=1):
        yield _line(number, item)


def _line(number: int, item: object) -> bytes:
    """Raises InputRefused for what no line can be made of; whether it can be run is told when all are checked."""
    value = _native(item)
    if isinstance(value, str):
        value = {"prompt": value}
    elif isinstance(value, list | tuple):
        value = {"messages": list(value)}
    elif not isinstance(value, Mapping):
        expected = "expected a prompt (text), a list of messages or an object"
        raise InputRefused(f"line {number}: {expected}, got {type(item).__name__}")
    try:
        return json.dumps(dict(value), default=_native_or_refused).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InputRefused(f"line {number}: expected values that JSON has: {error}") from error


def _is_frame(source: object) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(source, pandas.DataFrame)


def _rows(frame: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    """A row's values by column, without those that are missing."""
    from pandas import isna
    from pandas.api.types import is_scalar

    _check_columns([str(name) for name in frame.columns])
    for start in range(0, len(frame), _ROWS):
        for row in frame.iloc[start : start + _ROWS].to_dict("records"):
            yield {str(name): value for name, value in row.items() if not (is_scalar(value) and isna(value))}


def _check_columns(names: list[str]) -> None:
    """Once for all rows. Raises InputRefused for what is no field of a line, or is one twice."""
    for name in names:
        if names.count(name) > 1:
            raise InputRefused(f"column {name!r}: expected once, there are {names.count(name)} of that name")
    unknown = [f"column {name!r}: {what_is_unknown(name)}" for name in names if not is_field(name)]
    if unknown:
        way = "leave out what is no field of a line, or keep it in `metadata`, a column of objects"
        raise InputRefused("\n".join([*unknown, way]))


def _native(value: object) -> Any:
    """What numpy holds, as Python's own."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.tolist()
    return value


def _native_or_refused(value: object) -> Any:
    native = _native(value)
    if native is value:
        raise TypeError(f"{type(value).__name__} is none")
    return native
