"""The submitted file: opened or spooled so that it can be read twice, and checked as a whole."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
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
    if name == "-":
        with _spooled(sys.stdin.buffer, voice) as stream:
            yield stream
        return
    try:
        stream = Path(name).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise Refused(f"cannot read {name}: {error.strerror}") from error
    with stream:
        if stream.seekable():
            yield stream
        else:
            with _spooled(stream, voice) as copy:
                yield copy


@contextmanager
def _spooled(stream: BinaryIO, voice: Voice) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile(prefix="shardq-") as copy, voice.ticker("reading") as ticker:
        while chunk := stream.read(_CHUNK_BYTES):
            copy.write(chunk)
            ticker.tick_bytes(copy.tell())
        copy.seek(0)
        yield cast("BinaryIO", copy)


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
    #: endpoints of the lines
    urls: set[str] = field(default_factory=set)

    @property
    def endpoint(self) -> str | None:
        """The one endpoint of all lines, if they share one."""
        return next(iter(self.urls)) if len(self.urls) == 1 else None

    def add(self, item: ParsedJob | LineError, max_errors: int) -> None:
        """Count one line."""
        if isinstance(item, LineError):
            self.num_errors += 1
            if len(self.errors) < max_errors:
                self.errors.append(item)
            return
        self.num_jobs += 1
        self.urls.add(item.url)
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
