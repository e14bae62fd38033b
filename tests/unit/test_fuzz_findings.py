"""Inputs that once broke a reader. Each is refused now, as its kind of input is refused."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgpack
import pytest

from relay import codec, keys
from relay.errors import FrameInvalid
from relay.presence import Presence
from tasks import results
from tasks.errors import RecordInvalid
from tests.fuzz import targets
from tests.fuzz.targets import BY_NAME
from workers.head.channel_messages import MessageInvalid, decode_to_engine, decode_to_front

DEEP = b"[" * 100_000


def presence(**changes: Any) -> bytes:
    value = json.loads(BY_NAME["tail presence"].seeds[0])
    return json.dumps({**value, **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        presence(slots=float("inf")),
        presence(epoch=float("-inf")),
        presence(epoch=-1),
        presence(epoch=2**63),
        presence(split="15"),
        presence(profile={**targets.PROFILE.to_json(), "context": []}),
        DEEP,
        b'{"tail": ' + DEEP,
        b"9" * 5000,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_tails_presence_that_makes_no_sense_is_ignored(data: bytes) -> None:
    assert Presence.from_json(targets.TAIL, data) is None


@pytest.mark.parametrize("data", [DEEP, b"no json", b"[]", b'{"fingerprint": 1}'], ids=lambda data: repr(data[:20]))
def test_one_unreadable_head_or_profile_hides_no_other(data: bytes) -> None:
    assert targets.check_head_presence(data) is False


def test_a_head_whose_figures_are_no_numbers_is_left_out() -> None:
    value = json.loads(BY_NAME["head presence"].seeds[0])
    assert targets.check_head_presence(json.dumps(value).encode())
    assert not targets.check_head_presence(json.dumps({**value, "tokens_per_s": "fast"}).encode())


def test_a_stream_key_with_thousands_of_digits_has_no_epoch() -> None:
    assert keys.epoch_of(f"shardq:link:{targets.TAIL}:{'9' * 5000}:0:up") is None
    assert keys.epoch_of(keys.up(targets.TAIL, 2**63 - 1, 0)) == 2**63 - 1


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (b"started", {"job": {"a": 1}, "attempt": 1, "head": "h", "at": 1.5}),
        (b"started", {"job": "j", "attempt": float("-inf"), "head": "h", "at": 1.5}),
        (b"outcome", {**json.loads(BY_NAME["results stream"].seeds[1].partition(b" ")[2]), "text": ["a list"]}),
        (b"outcome", {**json.loads(BY_NAME["results stream"].seeds[1].partition(b" ")[2]), "metrics": [1]}),
    ],
)
def test_a_record_of_wrong_types_is_put_aside(kind: bytes, value: dict[str, Any]) -> None:
    with pytest.raises(RecordInvalid):
        results.decode(b"1-0", {b"kind": kind, b"json": json.dumps(value).encode()})


def test_a_record_nested_too_deeply_is_put_aside() -> None:
    with pytest.raises(RecordInvalid, match="RecursionError"):
        results.decode(b"1-0", {b"kind": b"outcome", b"json": DEEP})


@pytest.mark.parametrize("change", [{"request": [1]}, {"request": None}, {"job": 7}, {"attempt": "1"}, {"model": []}])
def test_a_task_of_wrong_types_is_refused(change: dict[str, Any]) -> None:
    parts = msgpack.unpackb(targets.TO_ENGINE[0])
    parts[1] = {**parts[1], **change}
    with pytest.raises(MessageInvalid, match="not a task"):
        decode_to_engine(msgpack.packb(parts))


@pytest.mark.parametrize("parameter", [{"max_tokens": "9"}, {"temperature": [0]}, {"seed": None}, {"stop": [1]}])
def test_a_task_whose_parameters_have_wrong_types_is_refused(parameter: dict[str, Any]) -> None:
    parts = msgpack.unpackb(targets.TO_ENGINE[0])
    parts[1]["request"] |= parameter
    with pytest.raises(MessageInvalid, match=f"request: GenerationRequest.{next(iter(parameter))}"):
        decode_to_engine(msgpack.packb(parts))


def test_true_is_no_number_of_tokens() -> None:
    with pytest.raises(MessageInvalid):
        decode_to_front(msgpack.packb(["progress", "j.1", True, 1.5]))


def test_a_refusal_repeats_little_of_what_it_refuses() -> None:
    parts = msgpack.unpackb(targets.TO_FRONT[1])
    parts[2]["failure"] = "x" * 100_000
    with pytest.raises(MessageInvalid) as caught:
        decode_to_front(msgpack.packb(parts))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xc0", b"\x91\x90"], ids=lambda item: item.hex())
def test_the_largest_header_costs_bounded_memory(item: bytes) -> None:
    row = b"\xdc\x0f\xff" + item * 4095
    rows = codec.MAX_HEADER_BYTES // len(row)
    header = b"\xdd" + rows.to_bytes(4, "big") + row * rows
    assert 0.9 * codec.MAX_HEADER_BYTES < len(header) <= codec.MAX_HEADER_BYTES
    frame = bytes((codec.VERSION, 0, 0, 0)) + len(header).to_bytes(4, "little") + header + bytes(16)
    tracemalloc.start()
    with pytest.raises(FrameInvalid):
        codec.decode(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_a_header_holds_no_kinds_of_values_that_no_message_has() -> None:
    for value in ({}, {"a": 1}, msgpack.Timestamp(1, 0), msgpack.ExtType(5, b"")):
        header = msgpack.packb([4, 1, 2, 3, value])
        with pytest.raises(FrameInvalid):
            codec.decode(bytes((codec.VERSION, 0, 0, 0)) + len(header).to_bytes(4, "little") + header + bytes(16))
