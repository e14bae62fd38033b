"""The submitted file: opened or spooled so that it can be read twice, and checked as a whole."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from cli.client.voice import Voice
from cli.errors import Refused
from tasks.openai_batch import Defaults, LineError, ParsedJob, read_requests

#: bytes read at a time
_CHUNK_BYTES = 1 << 20

#: is told of every line that cannot be a job
ErrorSink = Callable[[LineError], None]


@contextmanager
def open_input(name: str, voice: Voice) -> Iterator[BinaryIO]:
    """The file `name`, or `-` for stdin, as a stream that can be rewound. Raises Refused."""
    opened = spooled(_chunks(sys.stdin.buffer), voice) if name == "-" else open_file(Path(name), voice)
    with opened as stream:
        yield stream


@contextmanager
def open_file(path: Path, voice: Voice) -> Iterator[BinaryIO]:
    """The file as a stream that can be rewound. Raises Refused."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error
    with stream:
        if stream.seekable():
            yield stream
        else:
            with spooled(_chunks(stream), voice) as copy:
                yield copy


@contextmanager
def spooled(chunks: Iterable[bytes], voice: Voice) -> Iterator[BinaryIO]:
    """A temporary file of what these make together, read to the end first."""
    with tempfile.TemporaryFile(prefix="shardq-") as copy:
        with voice.ticker("reading") as ticker:
            for chunk in chunks:
                copy.write(chunk)
                ticker.tick_bytes(copy.tell())
        copy.seek(0)
        yield cast("BinaryIO", copy)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: stream.read(_CHUNK_BYTES), b"")


def digest(stream: BinaryIO) -> str:
    """SHA-256 of the whole stream as hex; leaves it at its beginning."""
    stream.seek(0)
    value = hashlib.sha256()
    while chunk := stream.read(_CHUNK_BYTES):
        value.update(chunk)
    stream.seek(0)
    return value.hexdigest()


@dataclass
class Check:
    """What a first reading of the whole file found."""

    num_jobs: int = 0
    num_errors: int = 0
    #: the first errors
    errors: list[LineError] = field(default_factory=list)
    #: lines by model name; None: neither the line nor the options name one
    models: Counter[str | None] = field(default_factory=Counter)
    first_lines: dict[str | None, int] = field(default_factory=dict)
    #: of the first line that can be a job
    endpoint: str | None = None

    def add(self, item: ParsedJob | LineError, max_errors: int) -> None:
        """Count one line."""
        if isinstance(item, LineError):
            self.num_errors += 1
            if len(self.errors) < max_errors:
                self.errors.append(item)
            return
        self.num_jobs += 1
        self.endpoint = self.endpoint or item.url
        self.models[item.model] += 1
        self.first_lines.setdefault(item.model, item.line)


def requests(stream: BinaryIO, defaults: Defaults, what: str, voice: Voice) -> Iterator[ParsedJob | LineError]:
    """Every line of the stream from its beginning, with progress."""
    total = stream.seek(0, 2)
    stream.seek(0)
    with voice.ticker(what, total) as ticker:
        for item in read_requests(stream, defaults):
            ticker.tick_bytes(stream.tell())
            yield item


def nowhere(error: LineError) -> None:
    """The sink of those who do not ask for all errors."""


def check_input(
    stream: BinaryIO, defaults: Defaults, voice: Voice, *, max_errors: int = 20, tell: ErrorSink = nowhere
) -> Check:
    """Read every line once; remembers at most `max_errors` errors, and tells of all of them."""
    check = Check()
    for item in requests(stream, defaults, "checking", voice):
        check.add(item, max_errors)
        if isinstance(item, LineError):
            tell(item)
    return check


def error_report(check: Check, where: str) -> str:
    """The errors found, one a line, how many more there are, and where all of them are or can be had."""
    lines = [str(error) for error in check.errors]
    if hidden := check.num_errors - len(check.errors):
        lines.append(f"… and {hidden} more: {where}")
    return "\n".join(lines)
