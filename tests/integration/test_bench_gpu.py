"""The benchmark of the GPU's work, rehearsed without a GPU on tiny models. How fast is for a GPU to find out."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.command import bench_of, main, parser
from benchmarks.gpu.profiler import device_spans, union_s
from benchmarks.gpu.replay import ReplayDrafter, acceptance_for
from benchmarks.gpu.rows import Row
from benchmarks.gpu.sections import rows_of
from relay.messages import Sampling
from workers.engine.graphs import Graphs
from workers.head.drafters import DraftRow, Proposal

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Drafting:
    """Drafts nonsense of the length that is asked for."""

    def begin(self, slot: int) -> None: ...

    def end(self, slot: int) -> None: ...

    def propose(self, rows: list[DraftRow]) -> list[Proposal]:
        return [Proposal((0,) * row.limit, (0.5,) * row.limit) for row in rows]


def arguments(tmp_path: Path, chosen: str) -> list[str]:
    return ["--device", "cpu", "--shapes", "tiny", "--only", chosen, "--out", str(tmp_path), "--name", "rehearsal"]


def rehearse(tmp_path: Path, chosen: str) -> list[dict[str, object]]:
    assert main(arguments(tmp_path, chosen)) == 0
    return json.loads((tmp_path / "rehearsal.json").read_text())["rows"]


def test_pieces_of_a_round_are_measured_recorded_and_eager_and_written_down(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, "draft,head,tail")
    assert all(row["value"] and row["floor"] for row in rows)
    ways = {(row["section"], str(row["work"]).rpartition(", ")[2]) for row in rows}
    assert ways == {(section, way) for section in ("draft", "head", "tail") for way in ("graphs", "eager")}
    assert (tmp_path / "rehearsal.md").read_text().count("| draft |") >= 4


def test_a_piece_that_records_nothing_where_it_should_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "__len__", lambda graphs: 0)
    assert main([*arguments(tmp_path, "head"), "--quick"]) == 1
    assert "RuntimeError: tiny-target 1 × 9, cache 128, forward: nothing was recorded" in (
        (tmp_path / "rehearsal.md").read_text()
    )


@pytest.mark.parametrize(
    ("row", "failed"),
    [
        (Row("s", "as wanted", 1.0, wanted="≤ 2"), False),
        (Row("s", "not as wanted", 3.0, wanted="≤ 2"), True),
        (Row("s", "not measured", None), True),
        (Row("s", "not asked for", None, left_out=True), False),
    ],
)
def test_what_could_not_be_measured_has_failed(row: Row, failed: bool) -> None:
    assert row.failed is failed


@pytest.mark.slow  # two processes that load torch, and the servers
def test_a_batch_through_two_processes_has_the_replayed_acceptance_and_the_known_texts(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, "e2e")
    assert [row["work"] for row in rows if row["value"] is None] == []
    rates = [row for row in rows if row["unit"] == "tokens/s"]
    assert len(rates) == 6
    assert all("tokens per round (replayed)" in str(row["note"]) for row in rates)


def broken(bench: Bench) -> Iterator[Row]:
    yield Row("broken", "first", 1.0)
    raise ValueError("no | such thing")


def killed(bench: Bench) -> Iterator[Row]:
    yield Row("killed", "first", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def endless(bench: Bench) -> Iterator[Row]:
    yield Row("endless", "first", 1.0)
    time.sleep(60)


def sound(bench: Bench) -> Iterator[Row]:
    yield Row("sound", "first", 1.0)


@pytest.mark.parametrize(
    ("section", "why"),
    [(broken, "ValueError: no / such thing"), (killed, "status -9"), (endless, "TooLong: more than 1 s")],
)
def test_a_section_that_ends_early_says_why_and_does_not_end_the_others(
    tmp_path: Path, section: Callable[[Bench], Iterator[Row]], why: str
) -> None:
    rows = list(rows_of({"bad": section, "sound": sound}, partial(rehearsal, tmp_path), 1, "fork"))
    assert [row.work for row in rows] == ["first", "ended early", "first"]
    assert why in rows[1].note


def rehearsal(tmp_path: Path) -> Bench:
    return bench_of(parser().parse_args(["--device", "cpu", "--shapes", "tiny"]), tmp_path)


def test_replayed_drafts_commit_as_many_tokens_a_round_as_asked_for() -> None:
    acceptance = acceptance_for(4.07, 8)
    assert sum(acceptance**i for i in range(9)) == pytest.approx(4.07)
    drafter = ReplayDrafter(Drafting(), acceptance, step=1, vocabulary=1_000_000)
    rounds = [_rounds(drafter, slot, tokens=400) for slot in range(16)]
    assert 16 * 400 / sum(rounds) == pytest.approx(4.07, rel=0.03)


def _rounds(drafter: ReplayDrafter, slot: int, tokens: int) -> int:
    """Rounds until so many tokens of a target that counts up are committed."""
    text, count = [7], 0
    while len(text) <= tokens:
        (proposal,) = drafter.propose([DraftRow(slot, text, GREEDY, 8)])
        right = [text[-1] + 1 + place for place in range(9)]
        accepted = next((i for i, token in enumerate(proposal.tokens) if token != right[i]), 8)
        text += right[: accepted + 1]
        count += 1
    return count


def test_no_acceptance_gives_more_tokens_than_a_round_carries() -> None:
    with pytest.raises(ValueError, match="8 drafted tokens"):
        acceptance_for(9.5, 8)


def test_a_device_counts_as_busy_once_however_many_kernels_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    kernel = {"cat": "kernel", "ts": 1e6, "dur": 2e6}
    others = [{"cat": "gpu_memcpy", "ts": 2e6, "dur": 3e6}, {"cat": "cpu_op", "ts": 0, "dur": 9e6}, {"ph": "M"}]
    trace.write_text(json.dumps({"traceEvents": [kernel, *others]}))
    assert union_s(device_spans(trace)) == pytest.approx(4.0)
