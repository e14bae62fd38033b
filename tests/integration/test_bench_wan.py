"""The benchmark of the long link counts what really happened. How fast is for `make bench-wan` to find out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rig import Way, rig
from benchmarks.wan import Line, table
from benchmarks.wan_prompts import chats, equal_jobs, with_system_prompt
from tests.models import tiny_model


def test_a_run_accounts_for_every_round_trip_token_and_byte(tmp_path: Path) -> None:
    with rig(tiny_model(tmp_path / "model", layers=2), slots=4, max_length=128) as ready:
        result = ready.run(equal_jobs(2, 6), Way(slots=2, rtt_ms=40, drafter="sentinel", draft_length=2, lanes=1))
        assert [len(text) for text in result.texts] == [6, 6]
        assert sum(num for _, num in result.traffic.commits) >= 12
        # a prefill and about five rounds, one round trip each
        assert result.wall_s > 5 * 0.04
        rounds = result.traffic.rounds
        assert rounds.bytes_up > rounds.tokens * ready.bytes_per_token > 0
        assert set(result.record.started_s) == set(result.record.finished_s) == {"job0.1", "job1.1"}
        assert ready.run(equal_jobs(2, 6), Way.one_at_a_time(0, 0)).texts == result.texts


@pytest.mark.parametrize(
    ("value", "wanted", "holds"), [(0.91, "≥ 0.9", True), (0.89, "≥ 0.9", False), (5.0, "≤ 5", True), (1.0, "", None)]
)
def test_a_line_knows_whether_it_is_as_wanted(value: float, wanted: str, holds: bool | None) -> None:
    assert Line("row", "what", value, "×", wanted).holds is holds


def test_the_table_says_what_does_not_hold() -> None:
    text = table([Line("row", "what", 3.0, "ms", "≤ 5"), Line("row", "other", 7.0, "ms", "≤ 5", "why")])
    assert "| row | what | 3 ms | ≤ 5 | yes |  |" in text
    assert "| row | other | 7 ms | ≤ 5 | **no** | why |" in text


def test_more_jobs_begin_with_the_same_ones_and_no_two_are_alike() -> None:
    for make in (chats, equal_jobs, with_system_prompt):
        jobs = make(100, 8)
        assert jobs[:10] == make(10, 8)
        assert len({str(job) for job in jobs}) == 100
