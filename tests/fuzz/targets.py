"""What is fuzzed: valid inputs, the damage done to them, and what must hold for whatever comes out.

A check returns whether the input was taken; anything raised is a finding. It goes beyond "no crash": what was
taken has the types its class declares, and survives a second trip.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from random import Random
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import redis

from relay import codec, keys
from relay.errors import FrameInvalid
from relay.messages import (
    Accepted,
    Copy,
    Draft,
    Error,
    ErrorReason,
    Hello,
    History,
    Message,
    Prefill,
    Release,
    Round,
    Sampling,
    Tensor,
    TokenLogprobs,
    Verdict,
    Void,
    VoidReason,
    Welcome,
)
from relay.presence import Presence
from relay.profile import Profile
from relay.tail_figures import TailFigures
from relay.transport import TailInfo
from tasks import results
from tasks.errors import RecordInvalid
from tasks.generation import (
    Alternative,
    Choice,
    FailureType,
    FinishReason,
    GenerationRequest,
    GenerationTask,
    Metrics,
    Outcome,
    TokenBias,
    TokenLogprob,
)
from tasks.heads import HeadInfo, live_heads, registered_models
from tasks.openai_batch import Defaults, LineError, ParsedJob, parse_line, read_requests
from tasks.recorder import outcome_row
from tests.fuzz.mutator import damage_bytes, damage_document, damage_packed
from workers.head.channel_messages import (
    Consuming,
    Finished,
    HandedBack,
    MessageInvalid,
    Progress,
    Started,
    Submit,
    decode_to_engine,
    decode_to_front,
    encode,
)

#: characters of the longest message about a refused input
MAX_REASON = 1000
#: bytes of a line in the checks of whole files
MAX_LINE_BYTES = 2048

TAIL = "gpu-b-0123abcd"
PROFILE = Profile("f00d" * 16, "float16", "nf4", "float16", deterministic=False, context=4096)


@dataclass(frozen=True, slots=True)
class Target:
    """One reader of foreign bytes."""

    name: str
    seeds: tuple[bytes, ...]
    damage: Callable[[Random, bytes], bytes]
    #: whether the input was taken; raises for a finding
    check: Callable[[bytes], bool]

    def inputs(self, rng: Random) -> Iterator[bytes]:
        """Damaged inputs without end."""
        while True:
            yield self.damage(rng, rng.choice(self.seeds))


# -- types ----------------------------------------------------------------------------------------------------


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def has_declared_types(value: Any, hint: Any = None) -> bool:
    """Whether every field of a dataclass, deeply, is what its annotation says."""
    kind = type(value) if hint is None else hint
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(has_declared_types(value, arm) for arm in get_args(kind))
    if origin is tuple:
        return isinstance(value, tuple) and all(has_declared_types(item, get_args(kind)[0]) for item in value)
    if is_dataclass(kind):
        hints = _hints(cast("type", kind))
        return type(value) is kind and all(
            has_declared_types(getattr(value, field.name), hints[field.name]) for field in fields(kind)
        )
    if origin is dict:
        return isinstance(value, dict)
    if kind in (int, float, str, bool, NoneType):
        return type(value) is kind or (kind is float and type(value) is int)
    return isinstance(value, kind) if isinstance(kind, type) and issubclass(kind, Enum) else True


def _refused(error: Exception) -> bool:
    """The way to say no: shortly."""
    assert len(str(error)) < MAX_REASON
    return False


# -- frames ---------------------------------------------------------------------------------------------------

_SAMPLING = Sampling(0.7, 40, 0.95, 0.05, -(2**63))
_PROCESSED = replace(
    _SAMPLING,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((7, -100.0), (300, 2.5)),
    barred=(2, 70_000),
    free_from=20,
    logprobs=2,
)
_LOGPROBS = (TokenLogprobs(-0.5, (1, 9), (-0.5, -1.25)), TokenLogprobs(-3.0, (), ()))


def _hidden(tokens: int) -> Tensor:
    return Tensor("float16", (tokens, 4), bytes(range(8)) * tokens)


HANDSHAKES: tuple[Message, ...] = (
    Hello("gpu-a", 7, 4, PROFILE, split=15, slots=16, max_query=64),
    Hello("", 0, 1, PROFILE, split=0, slots=0, max_query=0),
    Welcome(TAIL, 7),
    Error(7, ErrorReason.PROFILE_MISMATCH, "tail b and head a differ: fingerprint: x ≠ y"),
    Error(2**63 - 1, ErrorReason.TAIL_FAILED, "x" * 300),
)

FRAMES: tuple[Message, ...] = (
    Prefill(1, 3, 5, 0, 0, 17, False, _SAMPLING, Copy(2, 4, 12), _hidden(3)),
    Prefill(2, 3, 5, 1, 3, 18, True, Sampling(0.0, 0, 1.0, 0.0, 1), None, _hidden(1)),
    Prefill(7, 3, 6, 0, 0, 18, True, _PROCESSED, None, _hidden(2), History((1, 2, 70_000), (5,))),
    Round(3, (Draft(0, 1, 2, 30, 7, (1, 2, 3)), Draft(1, 1, 9, 4, 8, ())), _hidden(5)),
    Round(4, tuple(Draft(n, 1, n, n, n, (n,)) for n in range(12)), _hidden(24)),
    Release(5, 3, 5, 9),
    Verdict(3, (Accepted(0, 1, 2, 2, (1, 2, 9)), Void(1, 1, 9, VoidReason.BASE)), 0.012, 0.5),
    Verdict(6, (), 0.0, 0.0, TailFigures(5, 9, 0.5, 12.5, 1 << 30, 1 << 34)),
    Verdict(7, (Accepted(0, 1, 2, 1, (1, 9), _LOGPROBS), Accepted(1, 1, 2, 0, (4,))), 0.012, 0.5),
)


def check_frame(data: bytes) -> bool:
    """`FrameInvalid` and nothing else; what is taken survives a second trip."""
    try:
        message = codec.decode(data, 1 << 20)
    except FrameInvalid as error:
        return _refused(error)
    assert codec.decode(codec.encode(message)) == message
    return True


def damage_frame(rng: Random, frame: bytes) -> bytes:
    """Damage a header as a value, lie about its length, or damage the bytes of the whole."""
    kind = rng.random()
    if kind < 0.3:
        return damage_bytes(rng, frame)
    header_bytes = int.from_bytes(frame[4:8], "little")
    body_start = 8 + header_bytes + -(8 + header_bytes) % 16
    header, body = damage_packed(rng, frame[8 : 8 + header_bytes]), frame[body_start:]
    told = len(header) if kind < 0.85 else rng.choice((0, len(header) // 2, len(header) + 1, 2**31, 2**32 - 1))
    prefix = bytes((codec.VERSION, 0, 0, 0)) + told.to_bytes(4, "little")
    padding = bytes(-(8 + len(header)) % 16)
    if rng.random() < 0.1:
        body = body * rng.choice((0, 2, 100)) + b"x" * rng.randrange(3)
    return prefix + header + padding + body


# -- lines ----------------------------------------------------------------------------------------------------

_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 👋"}]
LINES: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time"},
    {"prompt": [1, 2, 3], "id": "tokens", "max_tokens": 16},
    {"messages": _CHAT, "custom_id": "chat", "temperature": 0.7, "seed": -5, "stop": ["\n", "END"]},
    {
        "custom_id": "openai",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "tiny",
            "messages": [*_CHAT, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
            "max_completion_tokens": 9,
            "top_p": 0.9,
            "n": 1,
            "stream": False,
            "metadata": {"a": "b"},
        },
    },
    {"custom_id": "old", "url": "/v1/completions", "body": {"prompt": "x", "top_k": 40, "min_p": 0.05, "echo": False}},
    {"prompt": "late", "expires_in": "10m", "ignore_eos": True, "logit_bias": {}, "user": "me"},
    {
        "prompt": "all",
        "n": 3,
        "best_of": 3,
        "logprobs": 2,
        "min_tokens": 4,
        "stop_token_ids": [5, 6],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -1},
    },
    {"messages": _CHAT, "logprobs": True, "top_logprobs": 3},
)
_DEFAULTS = Defaults.of(model="tiny", temperature=0.5)


def _holds(parsed: ParsedJob | LineError) -> bool:
    if isinstance(parsed, LineError):
        shown = str(parsed)
        assert len(shown) < MAX_REASON
        assert "\n" not in shown
        shown.encode()
        return False
    assert has_declared_types(parsed.request)
    stored = parsed.new_job(parsed.model or "tiny", 0.0)
    assert GenerationRequest.from_json(json.loads(stored.request.encode())) == parsed.request
    for text in (stored.custom_id, stored.model):
        text.encode()
    return True


def check_line(data: bytes) -> bool:
    """A job or the reason why it is none, fit to be stored or shown; nothing is raised."""
    return _holds(parse_line(7, data, _DEFAULTS))


def check_file(data: bytes) -> bool:
    """As `check_line` for a whole file; line numbers go up."""
    items = list(read_requests(io.BytesIO(data), _DEFAULTS, max_line_bytes=MAX_LINE_BYTES))
    numbers = [item.line for item in items]
    assert items
    assert numbers == sorted(set(numbers))
    taken = [_holds(item) for item in items]
    ids = [item.custom_id for item in items if isinstance(item, ParsedJob)]
    assert len(ids) == len(set(ids))
    return all(taken)


def damage_file(rng: Random, data: bytes) -> bytes:
    """Damage some lines of a file and what is between them."""
    lines = data.split(b"\n")
    for at in rng.sample(range(len(lines)), rng.choice((1, 2))):
        lines[at] = damage_document(rng, lines[at]) if lines[at].startswith(b"{") else rng.randbytes(9)
    joined = rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\r", b"\n\xef\xbb\xbf")).join(lines)
    return damage_bytes(rng, joined) if rng.random() < 0.2 else joined


# -- handshake and presence -----------------------------------------------------------------------------------


class _Values:
    """A queue server that answers with the same bytes whatever it is asked for."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def smembers(self, _: str) -> set[bytes]:
        return {b"h1"}

    def mget(self, names: list[str]) -> list[bytes]:
        return [self._value for _ in names]

    def hgetall(self, _: str) -> dict[bytes, bytes]:
        return {b"tiny": self._value}


def check_tail_presence(data: bytes) -> bool:
    """Ignored, or a presence of the right types that can be told again."""
    present = Presence.from_json(TAIL, data)
    if present is None:
        return False
    assert has_declared_types(present)
    assert Presence.from_json(TAIL, present.to_json()) is not None
    return True


def check_head_presence(data: bytes) -> bool:
    """Heads and registered profiles that cannot be read are left out, the rest has the right types."""
    client = cast("redis.Redis", _Values(data))
    heads, models = live_heads(client), registered_models(client)
    assert all(has_declared_types(item) for item in (*heads, *models.values()))
    return bool(heads or models)


def check_stream_key(data: bytes) -> bool:
    """The keys of streams that a scan of the server finds, whoever made them."""
    return keys.epoch_of(keys.links_pattern(TAIL)[:-1] + data.decode(errors="replace")) is not None


# -- local channel and results --------------------------------------------------------------------------------

_METRICS = Metrics(1.0, 2.0, 0.1, 31.5, 4, 2.5, 16, 10, 0, 1000, 100, 0.1, 0.2, 0.3, 0.4)
_REQUESTS = (
    GenerationRequest("prompt", None, 1, stop=("a",)),
    GenerationRequest(None, ({"role": "user", "content": "ü"},), -(2**63), temperature=0.0),
    GenerationRequest((1, 2, 3), None, 2**63 - 1, max_tokens=1, ignore_eos=True),
    GenerationRequest("x", None, 1, logit_bias=(TokenBias(5, -1.5),), min_tokens=3, stop_token_ids=(4,), logprobs=2),
    GenerationRequest("all", None, 5, n=2, logit_bias=(TokenBias(7, -1.0),), stop_token_ids=(5,), logprobs=1),
)
_A, _B = Alternative(5, "a", (97,), -0.5), Alternative(6, "\ufffd", (195,), -1.5)
_LOGPROBS = (TokenLogprob(_A, (_A, _B)), TokenLogprob(_B, (_A,)))
_OUTCOMES = (
    Outcome("batch_1-2", 1, "h", "täxt", (5, 6), FinishReason.STOP, 7, None, None, _METRICS),
    Outcome("batch_1-3", 2, "h", None, (), None, 0, FailureType.CONTEXT_LENGTH, "too long", None),
    Outcome(
        *("batch_1-4", 1, "h", "a\ufffd", (5, 6), FinishReason.STOP, 7, None, None, _METRICS),
        logprobs=_LOGPROBS,
        choices=(Choice("a", (5,), FinishReason.LENGTH, _LOGPROBS[:1]), Choice("", (), FinishReason.STOP)),
    ),
)
_TASKS = tuple(GenerationTask("batch_1-2", 1, "batch_1", "id", "tiny", request) for request in _REQUESTS)
TO_ENGINE = tuple(encode(Submit(task, number == 1)) for number, task in enumerate(_TASKS))
TO_FRONT = (
    *(encode(Finished(f"{outcome.job}.1", outcome)) for outcome in _OUTCOMES),
    *(encode(message) for message in (Consuming(True), Started("j.1"), Progress("j.1", 3, 1.5), HandedBack("j.1"))),
)


def check_to_engine(data: bytes) -> bool:
    """`MessageInvalid` and nothing else; what is taken has its types and survives a second trip."""
    return _check_channel(data, decode_to_engine)


def check_to_front(data: bytes) -> bool:
    """As `check_to_engine`, for the other direction."""
    return _check_channel(data, decode_to_front)


def _check_channel(data: bytes, decode: Callable[[bytes], Any]) -> bool:
    try:
        message = decode(data)
    except MessageInvalid as error:
        return _refused(error)
    assert has_declared_types(message)
    encode(decode(encode(message)))
    return True


def check_record(data: bytes) -> bool:
    """An entry of the results stream: `RecordInvalid`, or a row of the right types."""
    kind, _, body = data.partition(b" ")
    try:
        record = results.decode(b"1-0", {b"kind": kind, b"json": body})
    except RecordInvalid as error:
        return _refused(error)
    assert has_declared_types(record)
    if isinstance(record.content, Outcome):
        outcome_row(record.content)
    return True


def damage_record(rng: Random, data: bytes) -> bytes:
    """Damage the document behind the kind, sometimes the kind."""
    kind, _, body = data.partition(b" ")
    return (damage_bytes(rng, kind) if rng.random() < 0.05 else kind) + b" " + damage_document(rng, body)


def _documents(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


_TAIL_INFO = TailInfo(TAIL, PROFILE, split=15, slots=16, max_query=512, pulse=1.7e9)
_HEAD_INFO = HeadInfo("h1", "h1-1", "tiny", PROFILE, 16, ("batch_1-2.1",), True, 1, 31.5, 1.7e9)
_LINES = _documents(*LINES)

TARGETS: tuple[Target, ...] = (
    Target("frames", tuple(map(codec.encode, FRAMES)), damage_frame, check_frame),
    Target("handshake frames", tuple(map(codec.encode, HANDSHAKES)), damage_frame, check_frame),
    Target("lines", _LINES, damage_document, check_line),
    Target("files", (b"\n".join(_LINES), b"\n".join(_LINES[:2]) + b"\n"), damage_file, check_file),
    Target("tail presence", (Presence(_TAIL_INFO, 7).to_json(),), damage_document, check_tail_presence),
    Target(
        "head presence",
        (_HEAD_INFO.to_json().encode(), json.dumps(PROFILE.to_json()).encode()),
        damage_document,
        check_head_presence,
    ),
    Target("stream keys", (b"7:0:up", b"epoch", b"hello:up", b"9" * 5000 + b":0:up"), damage_bytes, check_stream_key),
    Target("channel to engine", TO_ENGINE, damage_packed, check_to_engine),
    Target("channel to front", TO_FRONT, damage_packed, check_to_front),
    Target(
        "results stream",
        (
            b'started {"job": "batch_1-2", "attempt": 1, "head": "h", "at": 1.5}',
            *(b"outcome " + json.dumps(outcome.to_json()).encode() for outcome in _OUTCOMES),
        ),
        damage_record,
        check_record,
    ),
)
#: inputs of each target among a thousand
SHARES = {
    "frames": 300,
    "handshake frames": 150,
    "lines": 210,
    "files": 10,
    "tail presence": 80,
    "head presence": 80,
    "stream keys": 10,
    "channel to engine": 65,
    "channel to front": 65,
    "results stream": 30,
}
BY_NAME = {target.name: target for target in TARGETS}


def quiet() -> None:
    """What the readers log about damaged inputs is not the point here."""
    for name in ("relay", "tasks"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
