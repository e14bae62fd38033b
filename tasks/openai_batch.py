"""Files of requests: OpenAI Batch lines and the short form, one JSON object a line, both in one file allowed.

OpenAI form: `{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}`, or with
`/v1/completions`.
Short form: `{"prompt": …}` or `{"messages": […]}` with parameters and `custom_id` (or `id`) beside it.
Both: `expires_in` beside `custom_id`, the time from submission until the job expires (`"10m"`, or seconds).
`tasks.openai_results` writes what comes out.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any, BinaryIO, NoReturn, Self

from storage.job_records import NewJob
from tasks.durations import DurationInvalid, seconds
from tasks.errors import ParameterInvalid
from tasks.foreign_files import SAMPLE_BYTES, SAMPLE_LINES, foreign
from tasks.generation import GenerationRequest, plain_fields
from tasks.openai_parameters import LINE_FIELDS, Form, is_parameter, read_parameters
from tasks.openai_prompts import read_messages, read_prompt
from tasks.openai_results import error_line, output_line, result_line
from tasks.parameter_rules import Unexpected, check, describe, is_text, printable

__all__ = [
    "Defaults",
    "LineError",
    "ParsedJob",
    "error_line",
    "output_line",
    "parse_line",
    "read_requests",
    "result_line",
]

#: bytes of the longest line that is read
MAX_LINE_BYTES = 16 * 1024 * 1024
#: characters of the longest `custom_id` and model name
MAX_NAME_CHARACTERS = 512

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
#: a whole address too, and Azure's, which has no version
_URL = re.compile(r"(?:https?://[^\s?#]+?)?(?:/v1)?/(?P<chat>chat/)?completions/?(?:[?][^\s#]*)?")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: of a file; files that were joined have one in their midst
_UTF8_BOMS = re.compile(rb"(?:\xef\xbb\xbf)*")
_OPENAI_FORM = ("method", "url", "body")


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line is refused: where, and what was expected there. `line` 0 is the file as a whole."""

    line: int
    #: None: the line as such
    field: str | None
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "the file"
        return f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a line that leaves something open gets. Build it with `Defaults.of`, which checks."""

    model: str | None = None
    #: checked fields of `GenerationRequest`
    parameters: Mapping[str, Any] = field(default_factory=dict)
    #: a line's model name → the served name that is meant
    map_model: Mapping[str, str] = field(default_factory=dict)
    #: the model names of lines say nothing
    any_model: bool = False

    @classmethod
    def of(
        cls,
        *,
        model: str | None = None,
        map_model: Mapping[str, str] | None = None,
        any_model: bool = False,
        **parameters: object,
    ) -> Self:
        """Defaults from a user's options, None for those not given; named and checked as in a line's body.

        Raises ParameterInvalid.
        """
        names = dict(map_model or {})
        for name in (*names.keys(), *names.values()):
            check("map_model", _name, name)
        if any_model and names:
            raise ParameterInvalid("any_model", "expected without map_model: it leaves nothing to map")
        return cls(_optional_name("model", model), read_parameters(parameters), names, any_model)

    def model_of(self, name: str | None) -> str | None:
        """The served name of a line that names this model; None if it is left open."""
        if name is None or self.any_model:
            return self.model
        return self.map_model.get(name, name)

    def to_json(self) -> dict[str, Any]:
        """These defaults as plain JSON values."""
        given = {"model": self.model, "map_model": dict(self.map_model), "any_model": self.any_model}
        return {**{name: value for name, value in given.items() if value}, **plain_fields(self.parameters)}


@dataclass(frozen=True, slots=True)
class ParsedJob:
    """A line that can be run."""

    #: 1-based
    line: int
    custom_id: str
    #: served name; None if neither the line nor the defaults name one
    model: str | None
    url: str
    request: GenerationRequest
    #: from submission until the job expires; None: when its batch does
    expires_in_s: float | None = None
    #: the user's notes
    metadata: dict[str, Any] | None = None

    def new_job(self, model: str, now: float) -> NewJob:
        """This line as a row of the database, for the served model `model`, submitted at `now` (Unix time)."""
        expires_at = None if self.expires_in_s is None else now + self.expires_in_s
        request = _ENCODER.encode(self.request.to_json())
        metadata = _ENCODER.encode(self.metadata) if self.metadata else None
        return NewJob(self.line, self.custom_id, model, self.url, request, expires_at, metadata)


def is_field(name: str) -> bool:
    """Whether a line, of whichever form, may have `name` at its top."""
    return is_parameter(name) or name in ("id", *LINE_FIELDS, *_OPENAI_FORM)


def draw_seed() -> int:
    """A seed for a request without one: 63 random bits."""
    return secrets.randbits(63)


def read_requests(
    stream: BinaryIO,
    defaults: Defaults,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    seeds: Callable[[], int] = draw_seed,
) -> Iterator[ParsedJob | LineError]:
    """Each line of `stream` as a job or as the reason why it is none, in order.

    Blank lines are no requests but have a line number. A file without a request is an error of its own, and
    so is a repeated `custom_id`. Reads one line at a time; remembers about 120 bytes per custom_id.
    """
    lines_by_id: dict[bytes, int] = {}
    is_empty = True
    lines = _lines(stream, max_line_bytes)
    first = _sample(lines)
    if what := foreign([data for _, data in first if isinstance(data, bytes) and data.strip()]):
        yield LineError(0, None, what)
        return
    for number, data in chain(first, lines):
        if isinstance(data, LineError):
            is_empty = False
            yield data
        elif data.strip():
            is_empty = False
            parsed = parse_line(number, data, defaults, seeds=seeds)
            yield parsed if isinstance(parsed, LineError) else _once(parsed, lines_by_id)
    if is_empty:
        yield LineError(0, None, "holds no request: expected one JSON object a line")


def parse_line(
    number: int, data: bytes, defaults: Defaults, *, seeds: Callable[[], int] = draw_seed
) -> ParsedJob | LineError:
    """The job that line `number` describes, or the first reason why it describes none."""
    try:
        return _job(number, _object(data), defaults, seeds)
    except ParameterInvalid as error:
        return LineError(number, error.field, error.message)


def _lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | LineError]]:
    """Numbered lines without byte order marks and their ends; one over `limit` bytes is skipped without being held."""
    number = 0
    while data := stream.readline(limit + 1):
        number += 1
        if len(data) > limit and not data.endswith(b"\n"):
            _skip_line(stream)
            yield number, LineError(number, None, f"expected at most {limit} bytes a line")
        else:
            yield number, _UTF8_BOMS.sub(b"", data, count=1).rstrip(b"\r\n")


def _sample(lines: Iterator[tuple[int, bytes | LineError]]) -> list[tuple[int, bytes | LineError]]:
    """The first lines, by which a file is judged."""
    first: list[tuple[int, bytes | LineError]] = []
    num_bytes = 0
    while len(first) < SAMPLE_LINES and num_bytes < SAMPLE_BYTES and (item := next(lines, None)):
        first.append(item)
        num_bytes += len(item[1]) if isinstance(item[1], bytes) else 0
    return first


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass


def _once(parsed: ParsedJob, lines_by_id: dict[bytes, int]) -> ParsedJob | LineError:
    digest = blake2b(parsed.custom_id.encode(), digest_size=16).digest()
    first = lines_by_id.setdefault(digest, parsed.line)
    if first == parsed.line:
        return parsed
    shown = describe(parsed.custom_id)
    return LineError(parsed.line, "custom_id", f"expected a name of its own, {shown} is that of line {first}")


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object in a line. Raises ParameterInvalid."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        message = f"expected UTF-8, byte 0x{byte:02x} at position {error.start + 1} is not"
        raise ParameterInvalid(None, message) from error
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        # Half a surrogate pair, only an escape makes one, is no text for a tokenizer or a database.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"{error.msg.lower().removesuffix(' at')} at character {error.pos + 1}"
        raise ParameterInvalid(None, f"expected a JSON object: {reason}") from error
    except UnicodeEncodeError as error:
        raise ParameterInvalid(None, "expected text, an escape is half of a surrogate pair") from error
    except RecursionError as error:
        raise ParameterInvalid(None, "expected a JSON object: nested too deeply") from error
    except ValueError as error:
        raise ParameterInvalid(None, "expected a JSON object: a number has too many digits") from error
    if not isinstance(value, dict):
        raise ParameterInvalid(None, f"expected a JSON object, got {describe(value)}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ParameterInvalid(printable(repeated), "expected each key once in an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ParameterInvalid(None, f"expected a JSON object: {name} is no JSON")


def _job(number: int, value: dict[str, Any], defaults: Defaults, seeds: Callable[[], int]) -> ParsedJob:
    read = _openai_form if any(name in value for name in _OPENAI_FORM) else _short_form
    custom_id, url, body = read(value)
    expires_in_s = _expires_in(value.get("expires_in"))
    prompt, messages = body.pop("prompt", None), body.pop("messages", None)
    model = defaults.model_of(_optional_name("model", body.pop("model", None)))
    if prompt is None and messages is None:
        _refuse_unknown(body)
    request = _source(url, prompt, messages)
    form = Form.CHAT if request["messages"] is not None else Form.COMPLETION
    parameters = read_parameters(body, form, defaults.parameters)
    if "seed" not in parameters:
        parameters["seed"] = seeds()
    url = CHAT_URL if form is Form.CHAT else COMPLETIONS_URL
    parsed = GenerationRequest(**request, **parameters)
    return ParsedJob(number, custom_id or f"line-{number}", model, url, parsed, expires_in_s, body.get("metadata"))


def _openai_form(value: dict[str, Any]) -> tuple[str | None, str | None, dict[str, Any]]:
    for name in value:
        if name not in ("custom_id", "expires_in", *_OPENAI_FORM):
            reason = "expected inside body" if is_parameter(name) else "unknown field"
            raise ParameterInvalid(printable(name), reason)
    if value.get("method") not in (None, "POST"):
        raise ParameterInvalid("method", f'expected "POST", got {describe(value["method"])}')
    url = _endpoint(value.get("url"))
    body = value.get("body")
    if not isinstance(body, dict):
        raise ParameterInvalid("body", f"expected an object, got {describe(body)}")
    if "expires_in" in body:
        raise ParameterInvalid("expires_in", "expected beside body")
    return _optional_name("custom_id", value.get("custom_id")), url, dict(body)


def _endpoint(url: object) -> str | None:
    """The endpoint of ours that a `url` means, whichever host it names. Raises ParameterInvalid."""
    if url is None:
        return None
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        raise ParameterInvalid("url", f"expected {CHAT_URL} or {COMPLETIONS_URL}, got {describe(url)}")
    return CHAT_URL if found["chat"] else COMPLETIONS_URL


def _short_form(value: dict[str, Any]) -> tuple[str | None, str | None, dict[str, Any]]:
    body = dict(value)
    body.pop("expires_in", None)
    custom_id = _optional_name("custom_id", body.pop("custom_id", None))
    other_id = _optional_name("id", body.pop("id", None))
    if custom_id is not None and other_id is not None and custom_id != other_id:
        raise ParameterInvalid("id", "expected custom_id or id, not both")
    return custom_id or other_id, None, body


def _refuse_unknown(body: dict[str, Any]) -> None:
    """Of a line without a source, first what it may have in its place. Raises ParameterInvalid."""
    for name in body:
        if not is_parameter(name):
            raise ParameterInvalid(printable(name), "unknown field: expected prompt or messages")


def _source(url: str | None, prompt: object, messages: object) -> dict[str, Any]:
    """`prompt` and `messages` for the request: exactly one of them, the one the endpoint takes."""
    if prompt is not None and messages is not None:
        raise ParameterInvalid("prompt", "expected prompt or messages, not both")
    if url == CHAT_URL and messages is None:
        raise ParameterInvalid("messages", f"expected for {CHAT_URL}" + _instead(prompt, "prompt"))
    if url == COMPLETIONS_URL and prompt is None:
        raise ParameterInvalid("prompt", f"expected for {COMPLETIONS_URL}" + _instead(messages, "messages"))
    if messages is not None:
        return {"prompt": None, "messages": read_messages(messages)}
    if prompt is not None:
        return {"prompt": read_prompt(prompt), "messages": None}
    raise ParameterInvalid("prompt", "expected prompt or messages, got neither")


def _instead(value: object, name: str) -> str:
    return "" if value is None else f", got {name}"


def _expires_in(value: object) -> float | None:
    return None if value is None else float(check("expires_in", _duration, value))


def _duration(value: object) -> float:
    try:
        return seconds(value)
    except DurationInvalid as error:
        raise Unexpected(str(error)) from error


def _optional_name(field_name: str, value: object) -> str | None:
    return None if value is None else str(check(field_name, _name, value))


def _name(value: object) -> str:
    if is_text(value) and 0 < len(value) <= MAX_NAME_CHARACTERS and "\0" not in value:
        return value
    raise Unexpected(f"a text of 1 to {MAX_NAME_CHARACTERS} characters without NUL")
