"""Inputs that Hypothesis builds from nothing, and shrinks: known fields with any values in them."""

from __future__ import annotations

import json
from typing import Any

import msgpack
from hypothesis import strategies as st

from relay import codec
from tests.fuzz.mutator import NUMBERS, TEXTS
from tests.fuzz.targets import LINES, TARGETS, Target

texts = st.text(max_size=30) | st.sampled_from(TEXTS)
json_numbers = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(NUMBERS)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | json_numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=12,
)
packed_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=12)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=12,
)


@st.composite
def documents(draw: st.DrawFn, seeds: tuple[dict[str, Any], ...]) -> bytes:
    """One of the seeds with some of its values, and some new ones, replaced by anything."""
    value = dict(draw(st.sampled_from(seeds)))
    known = sorted({key for seed in seeds for key in seed})
    for key in draw(st.lists(st.sampled_from(known) | texts, max_size=3)):
        value[key] = draw(json_values)
    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    return text + draw(st.binary(max_size=3))


@st.composite
def frames(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A frame with any header, or a valid header with some fields replaced, and any tensor bytes."""
    frame = draw(st.sampled_from(seeds))
    header_bytes = int.from_bytes(frame[4:8], "little")
    fields = msgpack.unpackb(frame[8 : 8 + header_bytes])
    for at in draw(st.lists(st.integers(0, len(fields) - 1), max_size=2)):
        fields[at] = draw(packed_values)
    header = msgpack.packb(fields)
    padding = bytes(-(8 + len(header)) % 16)
    body = frame[8 + header_bytes + -(8 + header_bytes) % 16 :] if draw(st.booleans()) else draw(st.binary(max_size=40))
    version = draw(st.sampled_from((codec.VERSION, codec.VERSION, 0, codec.VERSION - 1)))
    told = draw(st.just(len(header)) | st.integers(0, 2**32 - 1))
    return bytes((version, 0, 0, 0)) + told.to_bytes(4, "little") + header + padding + body


@st.composite
def channel_messages(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A message of the local channel with some of its parts replaced by anything."""
    parts = msgpack.unpackb(draw(st.sampled_from(seeds)))
    for at in draw(st.lists(st.integers(0, len(parts) - 1), max_size=2)):
        part = parts[at]
        if isinstance(part, dict) and part and draw(st.booleans()):
            part[draw(st.sampled_from(sorted(part)))] = draw(packed_values)
        else:
            parts[at] = draw(packed_values)
    packed: bytes = msgpack.packb(parts)
    return packed


def _objects(target: Target) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(seed) for seed in target.seeds)


def strategy_for(target: Target) -> st.SearchStrategy[bytes]:
    """Inputs for a target."""
    match target.name:
        case "frames" | "handshake frames":
            return frames(target.seeds)
        case "channel to engine" | "channel to front":
            return channel_messages(target.seeds)
        case "lines":
            return documents(LINES)
        case "files":
            return st.lists(documents(LINES) | st.binary(max_size=20), max_size=6).map(b"\n".join)
        case "tail presence" | "head presence":
            return documents(_objects(target))
        case "results stream":
            outcomes = tuple(json.loads(seed.partition(b" ")[2]) for seed in target.seeds)
            return st.tuples(st.sampled_from((b"outcome", b"started")), documents(outcomes)).map(b" ".join)
        case _:
            return st.binary(max_size=200)


STRATEGIES = {target.name: strategy_for(target) for target in TARGETS}
