"""How prefill is paced by the measured link."""

from __future__ import annotations

import pytest

from workers.head.speculation import Costs
from workers.head.uplink import BUDGET_S, MIN_CHUNK, Uplink

TOKEN_BYTES = 2000


def uplink(bytes_per_s: float) -> Uplink:
    costs = Costs()
    for num_bytes in (10_000, 40_000, 160_000):
        costs.observe_round(
            rows=1,
            longest=0,
            tokens=num_bytes // TOKEN_BYTES,
            draft_steps=0,
            draft_s=0.0,
            head_s=0.001,
            link_s=0.08 + num_bytes / bytes_per_s / Costs.BUSY_PART_OF_LINK,
            tail_s=0.001,
            bytes_up=num_bytes,
        )
    return Uplink(costs, TOKEN_BYTES, 64)


def test_a_chunk_is_as_long_as_the_setting_where_the_link_is_fast() -> None:
    assert uplink(1e9).chunk_tokens() == 64
    assert Uplink(Costs(), TOKEN_BYTES, 64).chunk_tokens() == 64


def test_a_chunk_takes_no_more_of_a_slow_link_than_its_budget() -> None:
    assert uplink(3e6).chunk_tokens() * TOKEN_BYTES / 3e6 == pytest.approx(BUDGET_S, rel=0.05)


def test_chunks_do_not_become_crumbs() -> None:
    assert uplink(1e4).chunk_tokens() == MIN_CHUNK


def test_what_was_sent_keeps_the_wire_busy_for_a_while() -> None:
    wire = uplink(1e6)
    wire.sent(10_000, now=5.0)
    wire.sent(20_000, now=5.0)
    assert wire.wait_s(5.01) == pytest.approx(0.02, rel=0.05)
    assert wire.wait_s(6.0) == 0.0
