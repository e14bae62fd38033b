"""What `shardq doctor --link` expects of a pair, and what it says limits it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli.doctor.link import COST_PER_GB
from relay.embedded import EmbeddedRedis
from relay.tail_figures import TailFigures
from tasks.connection import connect
from tasks.expectation import expected
from tasks.heads import claim
from tasks.settings import TaskSettings
from tests.bookkeeping import head_info
from tests.cli_runner import Shardq
from tests.live_figures import FIGURES

#: 100 rounds of 4 tokens: 10 ms of head, 80 ms of link and 10 ms of tail each, 1 MB up; 2 lanes
PAIR = replace(
    FIGURES,
    rounds_total=100,
    tokens_total=400,
    draft_s_total=0.4,
    head_s_total=0.6,
    link_s_total=8.0,
    tail_s_total=1.0,
    bytes_up_total=1_000_000,
    bytes_down_total=0,
    tail=None,
)


def test_a_long_link_with_few_lanes_gives_what_the_round_trip_lets_through() -> None:
    found = expected(PAIR, cost_per_gb=0.1)
    assert found is not None
    assert found.limit == "round trip"
    assert found.round_ms == pytest.approx(100)
    assert found.tokens_per_s == pytest.approx(80)  # 2 rounds of 4 tokens each 100 ms
    assert found.gb_per_hour == pytest.approx(80 * 3600 * 2500 / 1e9)
    assert found.cost_per_hour == pytest.approx(found.gb_per_hour * 0.1)
    assert found.cost_per_million_tokens == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "limit", "tokens_per_s"),
    [
        ({"lanes": 20, "tail_s_total": 4.0}, "tail", 100),
        ({"lanes": 20, "head_s_total": 3.6}, "head", 100),
        ({"lanes": 8, "mbit_per_s_up": 1.0}, "bandwidth", 50),
        # of 40 ms at the tail, frames wait 20 for each other
        ({"lanes": 20, "tail_s_total": 4.0, "tail": TailFigures(0, 800, 4.0, 9.0)}, "tail", 200),
        # a round trip that is compute is not the link's fault
        ({"lanes": 1, "link_s_total": 0.1, "tail_s_total": 3.0}, "tail", 4 / 0.041),
    ],
)
def test_the_busiest_part_is_the_limit(changes: dict[str, object], limit: str, tokens_per_s: float) -> None:
    found = expected(replace(PAIR, **changes), 0.09)  # type: ignore[arg-type]
    assert found is not None
    assert (found.limit, found.tokens_per_s) == (limit, pytest.approx(tokens_per_s))


def test_a_few_rounds_say_nothing_yet() -> None:
    assert expected(replace(PAIR, rounds_total=3), 0.09) is None


def test_the_command_measures_both_servers_and_tells_what_to_expect_of_a_pair(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        run = Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": server.url, "SHARDQ_RELAY_URL": server.url})
        alone = run("doctor", "--link")
        assert alone.exit_code == 0
        assert "no head that needs a tail" in alone.stdout
        with connect(TaskSettings(broker_url=server.url)) as client:
            claim(client, replace(head_info("gpu-a"), figures=PAIR))
        shown = run("doctor", "--link", "--cost-per-gb", "0").stdout
    assert "Mbit/s up" in shown
    assert "about 80.0 tokens/s, 0.72 GB and $0.00 an hour" in shown
    assert "gpu-a: round trip; more lanes" in shown
    assert COST_PER_GB == 0.09
