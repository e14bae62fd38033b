"""Frames: what is encoded comes back, and nothing that arrives can do harm."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay import codec, fields
from relay.codec import decode, encode
from relay.errors import FrameInvalid
from relay.messages import (
    DTYPE_BYTES,
    SCALE_BYTES,
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
from relay.profile import Profile
from relay.tail_figures import TailFigures
from relay.tensors import read_tensor
from tests.relay_messages import round_of

#: on a busy machine an example may take long without anything being wrong
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NEUTRAL = Sampling(0.0, 0, 1.0, 0.0, 1)

small = st.integers(0, 2**31 - 1)
long = st.integers(0, 2**63 - 1)
names = st.text(max_size=fields.MAX_NAME)
tokens = st.lists(small, max_size=20).map(tuple)


def numbers(high: float | None = None) -> st.SearchStrategy[float]:
    return st.floats(0.0, high, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: st.DrawFn, rows: int | None = None) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    height = rows if rows is not None else draw(st.integers(1, 5))
    width = draw(st.integers(1, 9))
    num_bytes = height * width * DTYPE_BYTES[dtype]
    num_scales = SCALE_BYTES * height if dtype == "int8" else 0
    scales = draw(st.binary(min_size=num_scales, max_size=num_scales))
    return Tensor(dtype, (height, width), draw(st.binary(min_size=num_bytes, max_size=num_bytes)), scales)


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    rows = tuple(draw(st.lists(st.builds(Draft, small, long, long, small, small, tokens), min_size=1, max_size=6)))
    return Round(draw(long), rows, draw(tensors(rows=sum(1 + len(row.draft) for row in rows))))


profiles = st.builds(Profile, names, names, names, names, st.booleans(), small)
finite = st.floats(allow_nan=False, allow_infinity=False)
plain_samplings = (numbers(), small, numbers(1.0), numbers(1.0), st.integers(-(2**63), 2**63 - 1))
processors = (
    *(numbers(), finite, finite),
    st.lists(st.tuples(small, finite), max_size=5).map(tuple),
    tokens,
    small,
)
samplings = st.builds(Sampling, *plain_samplings) | st.builds(
    Sampling, *plain_samplings, *processors, st.none() | st.integers(0, fields.MAX_ALTERNATIVES)
)
copies = st.none() | st.builds(Copy, small, long, small)
histories = st.none() | st.builds(History, tokens, tokens)
logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)


@st.composite
def alternatives(draw: st.DrawFn) -> TokenLogprobs:
    top = draw(st.lists(st.tuples(small, logprobs), max_size=fields.MAX_ALTERNATIVES))
    return TokenLogprobs(draw(logprobs), tuple(token for token, _ in top), tuple(value for _, value in top))


@st.composite
def accepted_rows(draw: st.DrawFn) -> Accepted:
    row = draw(st.builds(Accepted, small, long, long, st.integers(0, fields.MAX_TOKENS), tokens))
    if draw(st.booleans()):
        return row
    return replace(row, logprobs=tuple(draw(alternatives()) for _ in row.tokens))


accepted = accepted_rows()
told = st.none() | st.builds(
    TailFigures, long, long, numbers(fields.MAX_SECONDS), numbers(fields.MAX_SECONDS), long, long
)
voids = st.builds(Void, small, long, long, st.sampled_from(VoidReason))
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, names, long, st.integers(1, fields.MAX_LANES), profiles, small, small, small),
    st.builds(Welcome, names, long),
    st.builds(Error, long, st.sampled_from(ErrorReason), st.text(max_size=200)),
    st.builds(Prefill, long, small, long, long, small, small, st.booleans(), samplings, copies, tensors(), histories),
    rounds(),
    st.builds(Release, long, small, long, long),
    st.builds(Verdict, long, st.lists(accepted | voids, max_size=6).map(tuple), numbers(), numbers(), told),
)


def decodes_or_is_refused(data: bytes) -> None:
    try:
        decode(data)
    except FrameInvalid:
        return


@patient
@given(messages)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@patient
@given(messages)
def test_every_message_comes_back_from_a_compressed_frame_which_is_no_larger(message: Message) -> None:
    frame = encode(message, compress=True)
    assert decode(frame) == message
    assert encode(decode(frame), compress=True) == frame
    # a header field of some bytes more, and the padding behind it
    assert len(frame) <= len(encode(message)) + 16


@patient
@given(messages)
def test_a_tensor_starts_aligned_in_its_frame(message: Message) -> None:
    frame = encode(message)
    if isinstance(message, Prefill | Round):
        assert (len(frame) - len(message.hidden.data)) % 16 == 0


@patient
@given(messages, st.data())
def test_a_truncated_frame_is_refused(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    length = data.draw(st.integers(0, len(frame) - 1))
    # padding behind a header without tensor may be cut without loss
    if any(frame[length:]) or isinstance(message, Prefill | Round):
        with pytest.raises(FrameInvalid):
            decode(frame[:length])


@patient
@given(messages, st.data())
def test_a_damaged_frame_decodes_or_is_refused_but_never_fails_otherwise(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, min(len(frame), 160) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(bytes(frame))


@patient
@given(st.binary(max_size=200))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    decodes_or_is_refused(data)
    decodes_or_is_refused(codec._PREFIX.pack(codec.VERSION, len(data)) + data + bytes(16))


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
json_like = plain | st.lists(plain | st.lists(plain, max_size=7), max_size=7) | st.dictionaries(st.text(), plain)


@patient
@given(st.sampled_from([1, 2, 3, 4, 17, 18, 19]), st.lists(json_like, max_size=10))
def test_any_header_decodes_or_is_refused(kind: int, fields: list[object]) -> None:
    header = msgpack.packb([kind, *fields])
    decodes_or_is_refused(codec._PREFIX.pack(codec.VERSION, len(header)) + header)


@patient
@given(messages)
def test_a_decoded_message_can_be_encoded_again(message: Message) -> None:
    frame = encode(message)
    assert encode(decode(frame)) == frame


def test_deeply_nested_headers_are_refused() -> None:
    header = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(FrameInvalid):
        decode(codec._PREFIX.pack(codec.VERSION, len(header)) + header + bytes(16))


def test_another_version_is_refused_by_number() -> None:
    frame = bytearray(encode(round_of(1)))
    frame[0] = codec.VERSION + 1
    with pytest.raises(FrameInvalid, match=f"version {codec.VERSION + 1}, expected {codec.VERSION}"):
        decode(bytes(frame))


def test_a_frame_above_the_limit_is_refused_on_both_sides() -> None:
    message = round_of(1, num_bytes=5000)
    with pytest.raises(FrameInvalid, match="exceeds"):
        encode(message, max_bytes=4096)
    with pytest.raises(FrameInvalid, match="exceeds"):
        decode(encode(message), max_bytes=4096)


def shrinkable(num_tokens: int = 64, num_columns: int = 256) -> Round:
    """A round of one row whose float32 elements share their most significant byte."""
    data = bytes(n * 7 % 251 if n % 4 != 3 else 0x3F for n in range(4 * num_tokens * num_columns))
    draft = Draft(0, 1, 2, 3, 4, tuple(range(num_tokens - 1)))
    return Round(1, (draft,), Tensor("float32", (num_tokens, num_columns), data))


def test_a_compressed_frame_is_smaller_and_says_so_itself() -> None:
    message = shrinkable()
    frame = encode(message, compress=True)
    assert len(frame) < 0.8 * len(encode(message))
    assert decode(frame) == message


def test_noise_is_sent_as_it_is() -> None:
    tensor = Tensor("int8", (1, 4096), random.Random(0).randbytes(4096), bytes(4))
    message = Round(1, (Draft(0, 0, 0, 0, 0, ()),), tensor)
    assert encode(message, compress=True) == encode(message)


def test_a_tensor_beyond_the_frame_limit_is_refused_however_small_its_frame_is() -> None:
    message, limit = shrinkable(), 60_000
    frame = encode(message, compress=True)
    assert len(frame) < limit < len(message.hidden.data)
    with pytest.raises(FrameInvalid, match="exceeds the frame limit of 60000 bytes"):
        decode(frame, max_bytes=limit)
    with pytest.raises(FrameInvalid, match="exceeds the frame limit of 60000 bytes"):
        encode(message, max_bytes=limit, compress=True)


@pytest.mark.parametrize(
    ("most_significant", "message"),
    [
        (bytes(1 << 20), "does not inflate to 1024 bytes"),
        (bytes(1025), "does not inflate to 1024 bytes"),
        (bytes(1023), "does not inflate to 1024 bytes"),
        (None, "Tensor.deflated"),
    ],
)
def test_what_inflates_to_another_size_than_the_tensors_is_refused(
    most_significant: bytes | None, message: str
) -> None:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = b"\xff" * 50 if most_significant is None else deflater.compress(most_significant) + deflater.flush()
    with pytest.raises(FrameInvalid, match=message):
        read_tensor(["int8", [1, 1024], bytes(4), len(stream)], memoryview(stream), codec.MAX_FRAME_BYTES)


def test_nothing_may_follow_a_deflated_plane() -> None:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = deflater.compress(bytes(1024)) + deflater.flush() + b"more"
    with pytest.raises(FrameInvalid, match="does not inflate to 1024 bytes"):
        read_tensor(["int8", [1, 1024], bytes(4), len(stream)], memoryview(stream), codec.MAX_FRAME_BYTES)


@patient
@given(st.data())
def test_a_damaged_compressed_frame_decodes_or_is_refused(data: st.DataObject) -> None:
    frame = bytearray(encode(shrinkable(2, 32), compress=True))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(bytes(frame))


def test_a_tensor_must_have_as_many_bytes_as_its_shape_says() -> None:
    tensor = Tensor("float16", (1, 4), bytes(9))
    with pytest.raises(FrameInvalid, match=r"float16 \[1, 4\] does not fit 9 bytes"):
        encode(Round(1, (Draft(0, 0, 0, 0, 0, ()),), tensor))


def test_a_tensor_with_unknown_dtype_is_refused() -> None:
    with pytest.raises(FrameInvalid, match="complex64"):
        encode(Round(1, (Draft(0, 0, 0, 0, 0, ()),), Tensor("complex64", (1, 1), bytes(8))))


@pytest.mark.parametrize(
    ("dtype", "scales", "expected"),
    [("int8", b"", 8), ("int8", bytes(4), 8), ("int8", bytes(12), 8), ("float16", bytes(8), 0)],
)
def test_int8_has_one_scale_a_token_and_other_dtypes_have_none(dtype: str, scales: bytes, expected: int) -> None:
    tensor = Tensor(dtype, (2, 4), bytes(8 * DTYPE_BYTES[dtype]), scales)
    with pytest.raises(FrameInvalid, match=f"Tensor.scales: expected {expected} bytes"):
        encode(Round(1, (Draft(0, 0, 0, 0, 0, (1,)),), tensor))


def test_a_round_must_bring_a_hidden_state_for_every_token() -> None:
    tensor = Tensor("float16", (2, 4), bytes(16))
    with pytest.raises(FrameInvalid, match="2 rows, but its drafts need 3"):
        encode(Round(1, (Draft(0, 0, 0, 0, 0, (1, 2)),), tensor))


def test_more_tokens_than_a_row_may_have_are_refused() -> None:
    row = Accepted(0, 0, 0, 0, tuple(range(fields.MAX_TOKENS + 1)))
    with pytest.raises(FrameInvalid, match="at most 1024 items"):
        encode(Verdict(1, (row,), 0.0))


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_a_sampling_value_that_is_no_temperature_is_refused(temperature: float) -> None:
    sampling = Sampling(temperature, 0, 1.0, 0.0, 1)
    tensor = Tensor("float16", (1, 4), bytes(8))
    with pytest.raises(FrameInvalid, match="temperature"):
        encode(Prefill(1, 0, 0, 0, 0, 0, True, sampling, None, tensor))


def prefill(sampling: Sampling = NEUTRAL, history: History | None = None) -> Prefill:
    return Prefill(1, 0, 0, 0, 0, 0, True, sampling, None, Tensor("float16", (1, 4), bytes(8)), history)


def test_what_a_sampling_does_not_use_costs_two_bytes() -> None:
    frame = encode(prefill())
    header = msgpack.unpackb(frame[8 : 8 + int.from_bytes(frame[4:8], "little")])
    assert header[8] == [0.0, 0, 1.0, 0.0, 1, None, None]
    assert header[10] is None  # no history


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"logit_bias": ((1, float("nan")),)}, "biases: expected finite"),
        ({"logit_bias": ((-1, 0.5),)}, "biased"),
        ({"logit_bias": tuple((n, 1.0) for n in range(fields.MAX_BIASES + 1))}, "at most 1024"),
        ({"barred": (2**31,)}, "barred"),
        ({"barred": tuple(range(fields.MAX_BARRED + 1))}, "at most 1024"),
        ({"free_from": -1}, "free_from"),
        ({"logprobs": fields.MAX_ALTERNATIVES + 1}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_processors_out_of_bounds_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FrameInvalid, match=message):
        encode(prefill(replace(NEUTRAL, **changes)))  # type: ignore[arg-type]


def test_the_longest_history_fits_a_frame() -> None:
    message = prefill(history=History((2**31 - 1,) * fields.MAX_HISTORY, (5,) * fields.MAX_HISTORY))
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "history",
    [History((1,) * (fields.MAX_HISTORY + 1), ()), History((), (2**31,)), History((-1,), ()), History((2**40,), ())],
)
def test_a_history_out_of_bounds_is_refused(history: History) -> None:
    with pytest.raises(FrameInvalid, match="History"):
        encode(prefill(history=history))


@pytest.mark.parametrize(
    "logprobs",
    [
        (TokenLogprobs(0.5, (), ()),),
        (TokenLogprobs(float("nan"), (), ()),),
        (TokenLogprobs(float("-inf"), (), ()),),
        (TokenLogprobs(-1e300, (), ()),),
        (TokenLogprobs(-1.0, (1, 2), (-1.0,)),),
        (TokenLogprobs(-1.0, (-1,), (-1.0,)),),
        (TokenLogprobs(-1.0, (1,) * 21, (-1.0,) * 21),),
        (TokenLogprobs(-1.0, (), ()),) * 2,
    ],
)
def test_log_probabilities_that_are_none_or_not_one_for_each_token_are_refused(
    logprobs: tuple[TokenLogprobs, ...],
) -> None:
    with pytest.raises(FrameInvalid, match="ogprobs"):
        encode(Verdict(1, (Accepted(0, 0, 0, 0, (7,), logprobs),), 0.0))


def test_packed_values_of_half_a_width_are_refused() -> None:
    items = fields.Fields([struct.pack("<I", 1)[:3]], "History", 1)
    with pytest.raises(FrameInvalid, match="values of 4 bytes"):
        items.packed_tokens("prompt", 5)


def test_an_errors_long_text_is_cut_instead_of_refused() -> None:
    message = decode(encode(Error(1, ErrorReason.TAIL_FAILED, "x" * 100_000)))
    assert isinstance(message, Error)
    assert message.message == "x" * fields.MAX_TEXT


def test_decoding_copies_no_tensor() -> None:
    frame = encode(round_of(1, num_bytes=1 << 20))
    message = decode(frame)
    assert isinstance(message, Round)
    assert isinstance(message.hidden.data, memoryview)
    assert message.hidden.data.obj is frame
