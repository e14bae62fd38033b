"""The tail lives on: without a relay, without memory, and whatever frames it is sent."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from relay.codec import encode
from relay.errors import RelayError, RelayUnreachable
from relay.fields import MAX_ROWS
from relay.memory import MemoryHub, MemoryRelay
from relay.messages import (
    Accepted,
    Copy,
    Draft,
    Error,
    ErrorReason,
    Hello,
    History,
    Prefill,
    Release,
    Round,
    Sampling,
    Tensor,
    Upward,
    Verdict,
    Void,
    VoidReason,
    Welcome,
)
from relay.transport import Announcement, HeadLink, TailInfo, TailLink
from tests.relay_messages import PROFILE, hello_for, tail_info
from tests.unit.test_protocol import GREEDY, FakeTail
from workers.engine.slottables import SlotTables
from workers.tail import worker as worker_module
from workers.tail.engine import TailEngine
from workers.tail.worker import TailWorker

AWAY = RelayUnreachable("no answer")


class UnsteadyRelay(MemoryRelay):
    """A relay that is away for the first calls of each kind."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub)
        self.announce_errors: list[RelayError] = []
        self.accept_errors: list[RelayError] = []
        self.hello_errors: list[RelayError] = []

    def announce(self, tail: TailInfo) -> Announcement:
        if self.announce_errors:
            raise self.announce_errors.pop()
        return super().announce(tail)

    def accept(self, tail: str, hello: Hello) -> TailLink:
        if self.accept_errors:
            raise self.accept_errors.pop()
        return super().accept(tail, hello)

    def await_hello(self, tail: str, after_epoch: int, timeout_s: float) -> Hello | None:
        if self.hello_errors:
            raise self.hello_errors.pop()
        return super().await_hello(tail, after_epoch, timeout_s)


@dataclass
class Tail:
    """A tail in a thread, and a head's access to its relay."""

    hub: MemoryHub
    relay: UnsteadyRelay
    info: TailInfo
    shard: FakeTail
    stop: threading.Event
    thread: threading.Thread

    def open(self, **changes: object) -> HeadLink:
        """A link of a new epoch, not yet welcomed."""
        head = MemoryRelay(self.hub)
        deadline = time.monotonic() + 5
        while (lease := head.lease("head", self.info)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        hello = replace(hello_for(lease), **changes)  # type: ignore[arg-type]
        return head.connect(lease, hello)

    def welcomed(self) -> HeadLink:
        link = self.open()
        assert isinstance(answer(link), Welcome)
        return link


@pytest.fixture
def tail(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tail]:
    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    monkeypatch.setattr(worker_module, "POLL_S", 0.01)
    hub, stop, shard, info = MemoryHub(), threading.Event(), FakeTail(8), tail_info()
    relay = UnsteadyRelay(hub)
    worker = TailWorker(relay, info, shard)  # type: ignore[arg-type]
    found = Tail(hub, relay, info, shard, stop, threading.Thread(target=worker.serve, args=(stop,), daemon=True))
    yield found
    stop.set()
    if found.thread.ident is not None:
        found.thread.join(10)
        assert not found.thread.is_alive()


def answer(link: HeadLink, timeout_s: float = 5.0) -> object:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        received = link.receive(0.1)
        if received is not None:
            return received.message
    raise AssertionError("no answer")


def hidden(tokens: int, width: int = 2, dtype: str = "float32") -> Tensor:
    size = {"float32": 4, "float16": 2, "int8": 1}[dtype]
    scales = bytes(4 * tokens) if dtype == "int8" else b""
    return Tensor(dtype, (tokens, width), bytes(tokens * width * size), scales)


def chunk(number: int = 1, **changes: object) -> Prefill:
    whole = Prefill(number, 0, 0, 0, 0, 5, True, GREEDY, None, hidden(3))
    return replace(whole, **changes)  # type: ignore[arg-type]


def works(link: HeadLink, generation: int = 1_000_000) -> None:
    """The tail still does what it is for."""
    link.send(0, chunk(77, slot=3, generation=generation))
    while True:
        verdict = answer(link)
        assert isinstance(verdict, Verdict)
        if verdict.number == 77:
            break
    (row,) = verdict.rows
    assert isinstance(row, Accepted)


def test_a_relay_that_is_away_is_waited_for_and_said_once(tail: Tail, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tail.relay.announce_errors = [AWAY] * 3
        tail.relay.hello_errors = [AWAY, RelayError("busy"), AWAY]
        tail.relay.accept_errors = [AWAY, RelayError("busy"), AWAY]
        tail.thread.start()
        works(tail.welcomed())
    for what in ("cannot be announced", "no epoch can be opened", "no hello can be heard"):
        assert sum(what in r.message for r in caplog.records if r.levelno == logging.WARNING) == 1


def test_a_tail_that_is_stopped_before_the_relay_answers_ends(tail: Tail) -> None:
    tail.relay.announce_errors = [AWAY] * 1_000_000
    tail.thread.start()
    tail.stop.set()
    tail.thread.join(5)
    assert not tail.thread.is_alive()


def test_an_epoch_that_is_lost_ends_and_the_next_one_works(tail: Tail) -> None:
    tail.thread.start()
    for _ in range(3):
        works(tail.welcomed())
        tail.hub.lose(tail.info.tail)
        tail.hub.forget_lease(tail.info.tail)


def test_a_verdict_above_the_frame_limit_ends_its_epoch_and_not_the_tail(
    tail: Tail, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail.thread.start()
    link = tail.welcomed()
    huge = Verdict(1, (Void(0, 0, 0, VoidReason.BOUNDS),) * (MAX_ROWS + 1), 0.0)
    with monkeypatch.context() as asked_for_too_much:
        asked_for_too_much.setattr(worker_module, "answer_next", lambda line, engine: [(0, huge)])
        link.send(0, chunk())
        error = answer(link)
    assert isinstance(error, Error)
    assert error.reason is ErrorReason.TAIL_FAILED
    tail.hub.forget_lease(tail.info.tail)
    works(tail.welcomed())


def test_a_head_that_does_not_fit_is_refused_and_the_next_one_is_welcome(tail: Tail) -> None:
    tail.thread.start()
    refused = tail.open(slots=9, profile=replace(PROFILE, dtype="float16"))
    error = answer(refused)
    assert isinstance(error, Error)
    assert error.reason is ErrorReason.PROFILE_MISMATCH
    tail.hub.forget_lease(tail.info.tail)
    works(tail.welcomed())


ROW = Draft(0, 0, 1, 3, 5, ())
HISTORY = History((1, 2), (3, 3, 4))

HOSTILE: list[Upward] = [
    chunk(slot=99),
    chunk(hidden=hidden(3, 5)),
    chunk(hidden=hidden(300)),
    chunk(position=2**31 - 1),
    chunk(round=2**62),
    chunk(generation=2**62, round=7),
    chunk(copy=Copy(99, 0, 3), position=3),
    chunk(copy=Copy(1, 2**62, 2**31 - 1), position=2**31 - 1),
    chunk(hidden=hidden(3, 2, "float16"), generation=1),
    chunk(sampling=Sampling(1e300, 2**31 - 1, 0.0, 1.0, -(2**63)), generation=2),
    chunk(sampling=Sampling(1e-300, 1, 1.0, 0.0, 2**63 - 1), generation=3),
    chunk(sampling=Sampling(1.7e308, 5, 1e-300, 1e-300, 0), generation=4),
    chunk(token=2**31 - 1, generation=5),
    chunk(sampling=replace(GREEDY, logit_bias=((2**31 - 1, 1e308),)), generation=6),
    chunk(sampling=replace(GREEDY, logit_bias=((1, 1e308), (2, -1e308))), generation=7),
    chunk(sampling=replace(GREEDY, barred=tuple(range(11)), free_from=2**31 - 1, logprobs=20), generation=8),
    chunk(sampling=replace(GREEDY, repetition_penalty=0.0, temperature=1.0), history=HISTORY, generation=9),
    chunk(sampling=replace(GREEDY, presence_penalty=1e308, frequency_penalty=-1e308), history=HISTORY, generation=10),
    chunk(sampling=replace(GREEDY, presence_penalty=1.0), generation=11),
    chunk(sampling=replace(GREEDY, presence_penalty=1.0), history=History((), (11,)), generation=12),
    Round(1, (ROW, ROW, ROW), hidden(3)),
    Round(1, tuple(Draft(n, 0, 0, 0, 0, ()) for n in range(4096)), hidden(4096)),
    Round(1, (Draft(0, 0, 1, 3, 5, (2**31 - 1,) * 900),), hidden(901)),
    Round(1, (ROW,), hidden(1, 3)),
    Round(1, (ROW,), hidden(1, 2, "int8")),
    Round(1, (Draft(2**31 - 1, 2**63 - 1, 2**63 - 1, 2**31 - 1, 2**31 - 1, ()),), hidden(1)),
    Release(1, 99, 0, 0),
    Release(1, 0, 2**62, 2**62),
    Release(2**63 - 1, 7, 0, 0),
]


def test_every_well_formed_frame_is_answered_however_hostile_its_fields_are(tail: Tail) -> None:
    tail.thread.start()
    link = tail.welcomed()
    for frame in HOSTILE:
        link.send(0, frame)
        verdict = answer(link)
        assert isinstance(verdict, Verdict)
        assert verdict.number == frame.number  # type: ignore[union-attr]
        works(link, 10**6 + HOSTILE.index(frame))


FRAMES: list[Upward] = [
    Hello("head", 1, 1, PROFILE, 2, 8, 64),
    chunk(copy=Copy(1, 2, 3), position=3),
    Round(1, (replace(ROW, draft=(1, 2)),), hidden(3)),
    Release(1, 0, 0, 0),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_cut_off_anywhere_is_dropped_with_a_reason(
    tail: Tail, frame: Upward, caplog: pytest.LogCaptureFixture
) -> None:
    tail.thread.start()
    link, data = tail.welcomed(), encode(frame)
    with caplog.at_level(logging.WARNING, "relay.inbox"):
        for length in range(len(data)):
            tail.hub.epochs[tail.info.tail].up.deliver(0, data[:length])
            assert "dropped" in caplog.messages[-1]
    assert sum("dropped" in message for message in caplog.messages) == len(data)
    works(link)


@pytest.mark.parametrize(
    "data",
    [
        encode(Hello("head", 1, 1, PROFILE, 2, 8, 64)),
        encode(Verdict(1, (), 0.0)),
        encode(Welcome("tail", 1)),
        encode(Error(1, ErrorReason.TAIL_FAILED, "x")),
    ],
    ids=["hello", "verdict", "welcome", "error"],
)
def test_a_frame_that_belongs_elsewhere_is_dropped_with_a_reason(
    tail: Tail, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    tail.thread.start()
    link = tail.welcomed()
    with caplog.at_level(logging.WARNING):
        tail.hub.epochs[tail.info.tail].up.deliver(0, data)
        works(link)
    assert "does not belong in this direction" in caplog.text


# -- without memory ---------------------------------------------------------------------------------------------


class NarrowTail(FakeTail):
    """A half with memory for a few rows only; says so as torch does on a CPU."""

    def __init__(self, slots: int, most_rows: int) -> None:
        super().__init__(slots)
        self.most_rows = most_rows
        self.zeroed: list[int] = []

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        if len(hidden) > self.most_rows:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 123456789 bytes.")
        return super().forward(hidden, slots, starts)

    def zero_slot(self, slot: int) -> None:
        super().zero_slot(slot)
        self.zeroed.append(slot)


def prefilled(shard: NarrowTail, slots: int) -> tuple[TailEngine, list[int]]:
    """An engine whose slots stand after a prefill of 3, and their base tokens."""
    engine = TailEngine(shard, slots=slots, max_query=32)  # type: ignore[arg-type]
    most, shard.most_rows = shard.most_rows, 1
    tokens: list[int] = []
    for slot in range(slots):
        (row,) = engine.answer(chunk(slot=slot)).rows
        assert isinstance(row, Accepted)
        tokens += row.tokens
    shard.most_rows = most
    return engine, tokens


def a_round(number: int, tokens: dict[int, int]) -> Round:
    rows = tuple(Draft(slot, 0, 1, 3, token, ()) for slot, token in tokens.items())
    return Round(number, rows, hidden(len(rows)))


def test_rounds_that_find_no_memory_together_run_one_after_the_other() -> None:
    engine, tokens = prefilled(NarrowTail(4, most_rows=2), 4)
    rounds = [a_round(1, {0: tokens[0], 1: tokens[1]}), a_round(2, {2: tokens[2], 3: tokens[3]})]
    verdicts = engine.answer_all(rounds)
    assert [verdict.number for verdict in verdicts] == [1, 2]
    assert all(isinstance(row, Accepted) for verdict in verdicts for row in verdict.rows)


def test_the_rows_of_a_round_without_memory_come_back_void_and_the_numbers_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = NarrowTail(3, most_rows=1)
    engine, tokens = prefilled(shard, 3)
    frame = a_round(1, dict(enumerate(tokens)))
    verdict = engine.answer(frame)
    assert verdict.rows == tuple(Void(slot, 0, 1, VoidReason.OUT_OF_MEMORY) for slot in range(3))
    assert engine.answer(frame).rows == verdict.rows  # remembered, as every answer
    assert "123456789 bytes" in caplog.text
    assert shard.zeroed == [0, 1, 2]
    (row,) = engine.answer(chunk(slot=1, generation=1)).rows
    assert isinstance(row, Accepted)


def test_a_chunk_without_memory_is_void_and_its_slot_free_for_the_next_generation() -> None:
    shard = NarrowTail(1, most_rows=0)
    engine = TailEngine(shard, slots=1, max_query=32)  # type: ignore[arg-type]
    assert engine.answer(chunk()).rows == (Void(0, 0, 0, VoidReason.OUT_OF_MEMORY),)
    shard.most_rows = 1
    (row,) = engine.answer(chunk(generation=1)).rows
    assert isinstance(row, Accepted)


# -- processors -------------------------------------------------------------------------------------------------

COUNTING = replace(GREEDY, frequency_penalty=0.125)


def counting() -> tuple[TailEngine, NarrowTail, SlotTables, int]:
    """Slot 0 stands after a prefill of 3 with one token of output told and one chosen."""
    shard = NarrowTail(2, most_rows=9)
    tables = SlotTables(2, shard.vocab_size, "cpu")
    engine = TailEngine(shard, slots=2, max_query=32, tables=tables)  # type: ignore[arg-type]
    (row,) = engine.answer(chunk(sampling=COUNTING, history=History((), (6,)))).rows
    assert isinstance(row, Accepted)
    return engine, shard, tables, row.tokens[0]


def counts(tables: SlotTables) -> dict[int, int]:
    """What slot 0 has counted."""
    assert tables.counts is not None
    return {token: count for token, count in enumerate(tables.counts[0].tolist()) if count}


def test_what_a_slot_counts_is_its_history_and_each_verdicts_tokens_once() -> None:
    engine, _, tables, first = counting()
    expected = Counter([6, first])
    assert counts(tables) == expected
    frame = a_round(1, {0: first})
    (row,) = engine.answer(frame).rows
    assert isinstance(row, Accepted)
    expected += Counter(row.tokens)
    assert counts(tables) == expected
    assert engine.answer(frame).rows == (row,)  # sent again
    engine.answer(chunk(sampling=COUNTING, history=History((), (6,))))
    assert counts(tables) == expected


def test_a_prefix_copy_copies_no_counts() -> None:
    engine, _, tables, _ = counting()
    following = chunk(slot=1, copy=Copy(0, 0, 3), position=3, sampling=COUNTING, history=History((), ()))
    (row,) = engine.answer(following).rows
    assert isinstance(row, Accepted)
    assert tables.counts is not None
    assert tables.counts[1].sum() == 1


@pytest.mark.parametrize("end", ["released", "without memory", "not finite"])
def test_a_slot_whose_generation_is_over_counts_nothing_any_more(end: str) -> None:
    engine, shard, tables, first = counting()
    if end == "released":
        engine.answer(Release(1, 0, 0, 1))
    else:
        if end == "without memory":
            shard.most_rows = 0
        else:
            shard.logits = lambda hidden: torch.full((len(hidden), 11), torch.nan)  # type: ignore[method-assign]
        (row,) = engine.answer(a_round(1, {0: first})).rows
        assert isinstance(row, Void)
    assert counts(tables) == {}


def test_a_new_epoch_begins_with_nothing_counted_in_the_same_place() -> None:
    _, shard, tables, _ = counting()
    assert tables.counts is not None
    address = tables.counts.data_ptr()
    TailEngine(shard, slots=2, max_query=32, tables=tables)  # type: ignore[arg-type]
    assert counts(tables) == {}
    assert tables.counts.data_ptr() == address


def test_a_chunk_with_values_that_are_no_numbers_is_void_even_if_it_is_not_the_last() -> None:
    class Poisoned(NarrowTail):
        def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden, slots, starts) * torch.nan

    shard = Poisoned(1, most_rows=1)
    engine = TailEngine(shard, slots=1, max_query=32)  # type: ignore[arg-type]
    assert engine.answer(chunk(last=False)).rows == (Void(0, 0, 0, VoidReason.NON_FINITE),)
    assert shard.zeroed == [0]


def test_chunks_that_run_as_one_are_answered_as_alone_and_a_bad_one_hurts_no_other() -> None:
    class PoisonedSlot(NarrowTail):
        def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden, slots, starts).masked_fill((slots == 1)[:, None, None], torch.nan)

    shard, alone = PoisonedSlot(4, most_rows=4), NarrowTail(4, most_rows=1)
    engine, other = (TailEngine(each, slots=4, max_query=32) for each in (shard, alone))  # type: ignore[arg-type]
    chunks = [chunk(slot=slot, last=slot != 2) for slot in range(4)]
    verdicts = engine.answer_all(chunks)
    expected = [other.answer(each).rows[0] for each in chunks]
    expected[1] = Void(1, 0, 0, VoidReason.NON_FINITE)
    assert [verdict.rows for verdict in verdicts] == [(row,) for row in expected]
    assert shard.zeroed == [1]
    assert sum(verdict.tail_s for verdict in verdicts) > 0.0


def test_chunks_that_find_no_memory_together_run_one_after_the_other() -> None:
    engine = TailEngine(NarrowTail(2, most_rows=1), slots=2, max_query=32)  # type: ignore[arg-type]
    verdicts = engine.answer_all([chunk(slot=0), chunk(slot=1)])
    assert all(isinstance(verdict.rows[0], Accepted) for verdict in verdicts)
