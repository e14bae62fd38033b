"""What fits a frame is known before it is made, and is what the codec takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES, encode
from relay.fields import INT31, INT63, MAX_ALTERNATIVES, MAX_ROWS
from relay.messages import (
    DTYPE_BYTES,
    Accepted,
    Draft,
    Round,
    Tensor,
    TokenLogprobs,
    Verdict,
    Void,
    VoidReason,
    token_bytes,
)
from relay.tail_figures import TailFigures
from workers.head.frameroom import FrameRoom

FIGURES = TailFigures(INT63, INT63, 1e9, 1e9, INT63, INT63)


def largest_round(lengths: Sequence[int], hidden_size: int, dtype: str) -> Round:
    """A round whose numbers are all as large as they may be."""
    num_tokens = len(lengths) + sum(lengths)
    data = bytes(num_tokens * hidden_size * DTYPE_BYTES[dtype])
    scales = bytes(4 * num_tokens) if dtype == "int8" else b""
    rows = tuple(Draft(INT31, INT63, INT63, INT31, INT31, (INT31,) * length) for length in lengths)
    return Round(INT63, rows, Tensor(dtype, (num_tokens, hidden_size), data, scales))


def largest_verdict(lengths: Sequence[int], num_top: Sequence[int | None]) -> Verdict:
    """The verdict on such a round, all of it accepted."""
    rows = tuple(
        Accepted(INT31, INT63, INT63, length, (INT31,) * (1 + length), told(1 + length, top))
        for length, top in zip(lengths, num_top, strict=True)
    )
    return Verdict(INT63, rows, 1e9, 1e9, FIGURES)


def told(count: int, top: int | None) -> tuple[TokenLogprobs, ...]:
    return () if top is None else (TokenLogprobs(-1.0, (INT31,) * top, (-2.0,) * top),) * count


rows = st.lists(st.tuples(st.integers(0, 64), st.sampled_from([None, 0, 5, MAX_ALTERNATIVES])), min_size=1, max_size=40)


@given(
    rows=rows, hidden_size=st.integers(1, 64), dtype=st.sampled_from(list(DTYPE_BYTES)), limit=st.integers(300, 50_000)
)
def test_a_shortened_round_and_its_verdict_fit_whatever_stands_in_them(
    rows: list[tuple[int, int | None]], hidden_size: int, dtype: str, limit: int
) -> None:
    room = FrameRoom(token_bytes(hidden_size, dtype), limit)
    rows = rows[: room.most_rows]
    lengths, num_top = [length for length, _ in rows], [top for _, top in rows]
    short = room.shorten(lengths, num_top)
    if room.holds([0] * len(rows), num_top):
        assert len(encode(largest_round(short, hidden_size, dtype), limit)) <= limit
        assert len(encode(largest_verdict(short, num_top), limit)) <= limit
        assert (
            len(encode(Verdict(INT63, (Void(INT31, INT63, INT63, VoidReason.OUT_OF_MEMORY),) * len(rows), 1.0)))
            <= limit
        )
    cut = max(short)
    assert short == [min(cut, length) for length in lengths]
    if cut < max(lengths):
        assert not room.holds([min(cut + 1, length) for length in lengths], num_top)


@pytest.mark.parametrize(
    ("num_rows", "length", "hidden_size", "dtype", "num_top", "kept"),
    [
        (64, 16, 4096, "bfloat16", None, 16),
        (256, 16, 8192, "bfloat16", None, 14),
        (256, 16, 4096, "float32", None, 14),
        (256, 16, 8192, "int8", None, 16),
        (256, 16, 576, "float32", 20, 16),
        (256, 20, 576, "float32", 20, 19),
        (90, 64, 576, "float32", 20, 58),
        (1, 64, 16384, "float32", 20, 64),
    ],
)
def test_drafts_are_cut_where_a_round_would_be_above_64_mb_or_a_verdicts_header_above_1_mb(
    num_rows: int, length: int, hidden_size: int, dtype: str, num_top: int | None, kept: int
) -> None:
    room = FrameRoom(token_bytes(hidden_size, dtype), MAX_FRAME_BYTES)
    short = room.shorten([length] * num_rows, [num_top] * num_rows)
    assert short == [kept] * num_rows
    assert encode(largest_verdict(short, [num_top] * num_rows))


def test_the_longest_drafts_are_cut_first_and_rows_that_want_no_log_probabilities_are_spared_none_of_it() -> None:
    room = FrameRoom(token_bytes(8192, "bfloat16"), MAX_FRAME_BYTES)
    short = room.shorten([3] * 128 + [64] * 128, [None] * 256)
    assert short == [3] * 128 + [26] * 128
    assert len(encode(largest_round(short, 8192, "bfloat16"))) > 0.95 * MAX_FRAME_BYTES


def test_a_round_has_as_many_rows_as_fit_without_a_draft() -> None:
    assert FrameRoom(token_bytes(4096, "bfloat16"), MAX_FRAME_BYTES).most_rows == MAX_ROWS
    wide = FrameRoom(token_bytes(16384, "float32"), MAX_FRAME_BYTES)
    assert wide.most_rows == 1023
    num_top = [MAX_ALTERNATIVES] * wide.most_rows
    assert encode(largest_round(wide.shorten([16] * 1023, num_top), 16384, "float32"))
    assert encode(largest_verdict([0] * MAX_ROWS, [MAX_ALTERNATIVES] * MAX_ROWS))


def test_frames_without_a_size_hold_everything() -> None:
    room = FrameRoom(token_bytes(16384, "float32"), None)
    assert room.shorten([64] * 2000, [20] * 2000) == [64] * 2000
    assert (room.most_rows, room.chunk(512)) == (MAX_ROWS, 512)


@pytest.mark.parametrize(
    ("hidden_size", "limit", "tokens"), [(16384, 64 << 20, 512), (16384, 4 << 20, 47), (64, 1024, 1)]
)
def test_a_chunk_has_room_beside_the_largest_header(hidden_size: int, limit: int, tokens: int) -> None:
    room = FrameRoom(token_bytes(hidden_size, "float32"), limit)
    assert room.chunk(512) == tokens
    assert tokens == 1 or tokens * 4 * hidden_size + MAX_HEADER_BYTES < limit
