"""How prefill is paced by the measured link."""

from __future__ import annotations

import random

import pytest

from workers.head.uplink import BUDGET_S, MIN_CHUNK, Uplink

TOKEN_BYTES = 2000


def uplink(bytes_per_s: float, jitter_s: float = 0.0) -> Uplink:
    """Over two wires of this bandwidth."""
    rng, measured = random.Random(0), Uplink(TOKEN_BYTES, 64)
    for num_bytes in [200, 128_000, 400, 64_000] * 8:
        measured.measured(num_bytes, 0.08 + 2 * num_bytes / bytes_per_s + rng.uniform(0, jitter_s))
    return measured


def test_a_chunk_is_as_long_as_the_setting_where_the_link_is_fast_or_not_known() -> None:
    assert uplink(1e9).chunk_tokens() == 64
    assert Uplink(TOKEN_BYTES, 64).chunk_tokens() == 64


@pytest.mark.parametrize("jitter_s", [0.0, 0.02])
def test_a_chunk_takes_no_more_of_a_slow_link_than_its_budget(jitter_s: float) -> None:
    assert uplink(3e6, jitter_s).chunk_tokens() * TOKEN_BYTES / 3e6 == pytest.approx(BUDGET_S, rel=0.1)


def test_chunks_do_not_become_crumbs() -> None:
    assert uplink(1e4).chunk_tokens() == MIN_CHUNK


def test_small_frames_that_were_held_up_do_not_make_the_link_slow() -> None:
    wire = uplink(1e9)
    for _ in range(100):
        wire.measured(200, 0.3)
    assert wire.chunk_tokens() == 64


def test_what_was_sent_keeps_the_wire_busy_for_a_while() -> None:
    wire = uplink(1e6)
    wire.sent(10_000, now=5.0)
    wire.sent(20_000, now=5.0)
    assert wire.wait_s(5.01) == pytest.approx(0.02, rel=0.05)
    assert wire.wait_s(6.0) == 0.0
