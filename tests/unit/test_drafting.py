"""Drafts made beside the engine: the same calls in the same order, the same texts, and work that overlaps."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from relay.messages import Sampling
from tests.pair import Line, options
from tests.unit.test_protocol import (
    BadWire,
    FakeDrafter,
    FakeHead,
    FakeTail,
    Outcomes,
    Returning,
    Shortage,
    Trial,
    assert_whole,
    job,
    reference,
)
from workers.head.courier import Courier
from workers.head.drafters import DraftRow, Proposal
from workers.head.drafting import Asked, DraftingApart, Pending
from workers.head.engine import HeadEngine
from workers.head.slots import HeadSlot, Phase
from workers.settings import HeadSettings
from workers.tail.engine import TailEngine

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


class Log(list[str]):
    """What happened, in order, and in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()


class SlowDrafter(FakeDrafter):
    """Takes a while for every draft."""

    def __init__(self, log: Log, seconds: float = 0.01) -> None:
        super().__init__(random.Random(0), 0.7)
        self.log, self.seconds = log, seconds

    def begin(self, slot: int) -> None:
        self.log.append(f"begin {slot}")

    def end(self, slot: int) -> None:
        self.log.append(f"end {slot}")

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.log.append("draft")
        self.log.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        proposals = super().propose(rows)
        self.log.append("drafted")
        return proposals


class SlowHead(FakeHead):
    """Takes a while for every forward."""

    def __init__(self, slots: int, log: Log) -> None:
        super().__init__(slots)
        self.log = log

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        self.log.append("compute")
        time.sleep(0.01)
        hidden = super().forward(tokens, slots, starts)
        self.log.append("computed")
        return hidden


def overlaps(log: Log) -> int:
    """Forwards that began between the beginning and the end of a draft."""
    drafting, found = False, 0
    for event in log:
        drafting = event == "draft" or (drafting and event != "drafted")
        found += drafting and event == "compute"
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_a_lanes_forward_and_the_next_lanes_drafts_overlap_only_where_the_drafter_is_apart(apart: bool) -> None:
    slots, log, outcomes = 4, Log(), Outcomes()
    engine = HeadEngine(
        SlowHead(slots, log),  # type: ignore[arg-type]
        SlowDrafter(log),
        Line(job(number, [number, 2, 3], 20) for number in range(slots)),
        outcomes,
        options(slots=slots, draft_length=2, lanes=2, drafts_apart=apart),
    )
    wire = BadWire(TailEngine(FakeTail(slots), slots=slots, max_query=32), random.Random(0), [0])  # type: ignore[arg-type]
    engine.open(Courier(wire, clock=wire.clock))  # type: ignore[arg-type]
    while len(outcomes.finished) < slots:
        engine.step()
    engine.close()
    for number in range(slots):
        assert list(outcomes.finished[f"job{number}.1"].token_ids) == reference([number, 2, 3], 20)
    assert (overlaps(log) >= 3) == apart
    assert log.threads == {"drafter_0" if apart else threading.current_thread().name}
    for slot in range(slots):
        assert log.count(f"begin {slot}") == log.count(f"end {slot}") == 1


@pytest.mark.parametrize("seed", range(12))
def test_texts_are_the_models_own_with_drafts_made_apart_whatever_the_wire_does(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [
        (reference([rng.randrange(3)], 20)[: rng.randrange(1, 20)], rng.randrange(1, 25), rng.randrange(20))
        for _ in range(7)
    ]
    trial = Trial(rng, 3, Returning(set()), Shortage(rng, 0), faults=seed % 3 * 10, delay=0.5, processed=set())
    trial.make_engine(0.7, options(slots=3, draft_length=4, lanes=2, prefill_chunk=6, drafts_apart=True))
    deadline = time.monotonic() + 30
    number = 0
    while len(trial.outcomes.finished) < len(jobs):
        assert time.monotonic() < deadline
        trial.arrive(jobs, number, set())
        if rng.random() < 0.01:
            trial.engine.hand_back_all()
        if rng.random() < 0.01:
            trial.connect()
        trial.turn()
        time.sleep(0.001)  # the wire's clock is not the drafter's: it must not run far ahead
        number += 1
    trial.engine.close()
    for index, (prompt, count, _) in enumerate(jobs):
        outcome = trial.outcomes.finished[f"job{index}.1"]
        if outcome.failure is None:
            assert_whole(outcome, prompt, count)
        else:
            assert "voided" in str(outcome.failure_message)


def asked(*indexes: int, lane: int = 0) -> Asked:
    slots = tuple(HeadSlot(index, phase=Phase.DECODE, generation=0) for index in indexes)
    rows = tuple(DraftRow(index, [1, 2, index], GREEDY, 2) for index in indexes)
    return Asked(lane, slots, (0,) * len(slots), rows, 1)


def taken(drafting: DraftingApart) -> Pending:
    deadline = time.monotonic() + 10
    while (pending := drafting.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return pending


def test_a_drafter_apart_sees_every_call_in_the_order_in_which_it_was_made_and_tells_when_it_is_done() -> None:
    log, ready = Log(), threading.Semaphore(0)
    drafting = DraftingApart(SlowDrafter(log), "cpu", ready.release)
    drafting.begin(0)
    drafting.ask(asked(0, 1))
    drafting.end(0)
    drafting.begin(0)
    drafting.ask(asked(0, lane=1))
    assert [taken(drafting).asked.lane for _ in range(2)] == [0, 1]
    drafting.close()
    assert log == ["begin 0", "draft", "drafted", "end 0", "begin 0", "draft", "drafted"]
    assert all(ready.acquire(timeout=1) for _ in range(2))


def test_a_row_whose_job_ended_or_began_anew_while_it_was_drafted_wants_its_draft_no_more() -> None:
    round_ = asked(0, 1, 2, 3)
    round_.slots[1].phase = Phase.FREE
    round_.slots[2].generation += 1
    round_.slots[3].phase = Phase.PREFILL
    assert round_.places == [0]
    assert round_.present == [round_.slots[0]]


def test_forgetting_waits_for_the_draft_under_way_and_drops_the_others() -> None:
    log = Log()
    drafting = DraftingApart(SlowDrafter(log, seconds=0.2), "cpu", lambda: None)
    drafting.ask(asked(0))
    drafting.ask(asked(1))
    while "draft" not in log:
        time.sleep(0.001)
    drafting.forget()
    assert log == ["draft", "drafted"]
    assert drafting.take() is None
    drafting.close()


class Broken(FakeDrafter):
    """Fails in one of its calls."""

    def __init__(self, call: str) -> None:
        super().__init__(random.Random(0), 1.0)
        self.call = call

    def begin(self, slot: int) -> None:
        if self.call == "begin":
            raise torch.OutOfMemoryError("no room to begin")

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        raise torch.OutOfMemoryError("no room to draft")


def test_what_the_drafter_raises_comes_out_where_its_drafts_would() -> None:
    drafting = DraftingApart(Broken("propose"), "cpu", lambda: None)
    drafting.ask(asked(0))
    pending = taken(drafting)
    with pytest.raises(torch.OutOfMemoryError, match="no room to draft"):
        pending.drafted()
    drafting.close()
    drafting = DraftingApart(Broken("begin"), "cpu", lambda: None)
    drafting.begin(0)
    with pytest.raises(torch.OutOfMemoryError, match="no room to begin"):
        taken(drafting)
    drafting.close()


@pytest.mark.parametrize(
    ("device", "drafter_device", "drafter", "apart"),
    [
        ("cuda", None, "model", None),
        ("cuda", "cuda:0", "model", None),
        ("cuda:0", "cuda", "hybrid", None),
        ("cuda", "cuda:1", "model", "cuda:1"),
        ("cuda:1", "cuda", "hybrid", "cuda"),
        ("cuda", "cpu", "model", "cpu"),
        ("cuda", "cuda:1", "ngram", None),
    ],
)
def test_only_a_model_on_another_device_drafts_apart(
    device: str, drafter_device: str | None, drafter: str, apart: str | None
) -> None:
    settings = HeadSettings(model="m", device=device, drafter_device=drafter_device, drafter=drafter)  # type: ignore[arg-type]
    assert settings.drafts_apart_on == apart
    assert HeadSettings(
        model="m",
        device=device,
        drafter_device=drafter_device,
        drafter=drafter,
        whole=True,  # type: ignore[arg-type]
    ).link_lanes == (1 if apart is None else 2)
