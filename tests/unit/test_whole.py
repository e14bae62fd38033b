"""Head and tail in one process: what is handed over, what goes wrong, and what is held once."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from relay.codec import encode
from relay.errors import FrameInvalid, LinkLost
from relay.messages import Hello, Release, Round, Verdict, Welcome
from tasks.generation import StopReason
from tests.models import tiny_model
from tests.pair import Line, Outcomes, options
from tests.relay_messages import PROFILE, tail_info
from tests.unit.test_head_worker import Engine, Sessions
from tests.unit.test_protocol import FakeDrafter, FakeHead, FakeTail, assert_partial, job, reference
from workers.engine.loader import load_head, load_tail
from workers.engine.tensors import from_wire, hand_over, pack_rows, pad_rows, to_wire
from workers.head.courier import Courier
from workers.head.engine import HeadEngine
from workers.head.session import HeadOffer, TailSearch
from workers.head.worker import HeadWorker, engine_options
from workers.settings import HeadSettings
from workers.whole.link import DirectLink, DirectRelay

CPU = torch.device("cpu")


def link_to(tail: FakeTail) -> DirectLink:
    """An epoch as a head finds it."""
    info = replace(tail_info("whole"), slots=tail.slots, max_query=32)
    offer = HeadOffer("head", info.profile, info.split, tail.slots, 1, 32)
    session = TailSearch(DirectRelay(info, tail), offer).find(threading.Event())  # type: ignore[arg-type]
    assert session is not None
    assert session.lease.held()
    assert isinstance(session.link, DirectLink)
    return session.link


def engine_on(tail: FakeTail, line: Line, outcomes: Outcomes, *, lanes: int = 1) -> HeadEngine:
    """A head's engine over this tail, as `shardq head --whole` joins them."""
    engine = HeadEngine(
        FakeHead(tail.slots),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 0.6),
        line,
        outcomes,
        options(slots=tail.slots, draft_length=3, lanes=lanes, prefill_chunk=6, whole=True),
    )
    engine.open(Courier(link_to(tail)))
    return engine


@pytest.mark.parametrize("lanes", [1, 2])
def test_texts_are_the_models_own_and_nothing_is_on_a_wire(lanes: int) -> None:
    outcomes, prompts = Outcomes(), [reference([number], 25)[: 3 * number + 1] for number in range(7)]
    engine = engine_on(FakeTail(3), Line(job(n, prompt, 20) for n, prompt in enumerate(prompts)), outcomes, lanes=lanes)
    while len(outcomes.finished) < len(prompts):
        engine.step()
    for number, prompt in enumerate(prompts):
        outcome = outcomes.finished[f"job{number}.1"]
        assert list(outcome.token_ids) == reference(prompt, 20)
        assert outcome.metrics is not None
        assert (outcome.metrics.wire_bytes_up, outcome.metrics.wire_bytes_down) == (0, 0)


def test_where_the_tails_half_has_no_memory_for_all_jobs_some_wait_and_none_fails() -> None:
    outcomes, tail = Outcomes(), FakeTail(3)
    engine = engine_on(tail, Line(job(number, [number] * (2 + 9 * number), 8) for number in range(3)), outcomes)
    while engine._scheduler.num_rows < 3:
        engine.step()
    left = [1]
    tail.shortage = lambda: bool(left) and left.pop() == 1
    while len(outcomes.finished) < 3:
        engine.step()
    for number in range(3):
        assert list(outcomes.finished[f"job{number}.1"].token_ids) == reference([number] * (2 + 9 * number), 8)


def test_a_stopped_job_keeps_the_text_it_has() -> None:
    outcomes = Outcomes()
    engine = engine_on(FakeTail(2), Line(job(number, [number, 2], 30) for number in range(2)), outcomes)
    for _ in range(4):
        engine.step()
    engine.stop("job1.1", StopReason.CANCELLED)
    while len(outcomes.finished) < 2:
        engine.step()
    assert outcomes.finished["job1.1"].stopped is StopReason.CANCELLED
    assert_partial(outcomes.finished["job1.1"], reference([1, 2], 30))
    assert list(outcomes.finished["job0.1"].token_ids) == reference([0, 2], 30)


class FailingTail(FakeTail):
    """A half that breaks for good."""

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("broken")


def test_a_tails_half_that_breaks_ends_the_engine_and_no_link_is_said_to_be_lost() -> None:
    engine = engine_on(FailingTail(1), Line([job(0, [1, 2], 5)]), Outcomes())
    with pytest.raises(ZeroDivisionError):
        engine.step()


def test_an_epoch_opens_with_a_welcome_answers_what_is_sent_and_waits_until_it_is_woken() -> None:
    link = DirectRelay(tail_info("whole"), FakeTail(2)).connect(  # type: ignore[arg-type]
        Mock(**{"tail.tail": "whole"}), Hello("head", 7, 1, PROFILE, 2, 2, 32)
    )
    first = link.receive(0.0)
    assert first is not None
    assert first.message == Welcome("whole", 7)
    assert link.receive(0.0) is None
    assert link.send(0, Release(1, 0, 0, 0)) == 0
    answer = link.receive(0.0)
    assert answer is not None
    assert isinstance(answer.message, Verdict)
    assert (answer.message.number, answer.num_bytes) == (1, 0)
    threading.Timer(0.05, link.wake).start()
    assert link.receive(30.0) is None
    link.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_is_handed_over_is_what_would_have_come_over_the_wire(dtype: str, compute: torch.dtype) -> None:
    values = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(compute)
    values[3, 5] = math.nan
    handed, carried = hand_over(values, dtype), to_wire(values, dtype)
    assert (handed.dtype, handed.shape) == (carried.dtype, carried.shape)
    one, other = (from_wire(tensor, dtype=compute, device=CPU) for tensor in (handed, carried))
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)) or torch.equal(one.isnan(), other.isnan())
    assert torch.equal(one.nan_to_num(), other.nan_to_num())
    values.zero_()
    assert torch.equal(from_wire(handed, dtype=compute, device=CPU).nan_to_num(), other.nan_to_num())


def test_a_frame_that_is_handed_over_cannot_go_over_a_wire() -> None:
    with pytest.raises(FrameInvalid):
        encode(Round(1, (), hand_over(torch.ones(2, 4), "float32")))


@pytest.mark.parametrize("counts", [[3, 3], [1, 1, 1], [1, 3, 2], [4]])
def test_rows_of_equal_and_of_unequal_lengths_are_packed_and_padded_alike(counts: list[int]) -> None:
    packed = torch.arange(2 * sum(counts)).reshape(-1, 2)
    padded = pad_rows(packed, counts)
    assert padded.shape == (len(counts), max(counts), 2)
    assert torch.equal(pack_rows(padded, counts), packed)
    for row, part in zip(padded, torch.split(packed, counts), strict=True):
        assert torch.equal(row[: len(part)], part)
        assert not row[len(part) :].any()


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_are_the_lm_head_too_are_held_once(tmp_path: Path, tied: bool) -> None:
    directory, sizes = tiny_model(tmp_path, "llama", tied=tied), {"slots": 1, "max_length": 16, "max_query": 4}
    head = load_head(directory, 2, **sizes)  # type: ignore[arg-type]
    tail = load_tail(directory, 2, **sizes, embedding=head.embedding)  # type: ignore[arg-type]
    alone = load_tail(directory, 2, **sizes)  # type: ignore[arg-type]
    assert (tail._lm_head.weight.data_ptr() == head.embedding.data_ptr()) == tied
    hidden = torch.randn(3, tail.hidden_size)
    assert torch.equal(tail.logits(hidden), alone.logits(hidden))


def test_an_answer_that_takes_long_is_waited_for_where_no_frame_can_get_lost() -> None:
    stop = threading.Event()
    sessions = Sessions([LinkLost("never")], stop)
    engine = Engine(sessions)
    HeadWorker(engine, Mock(), Mock(), lossless=True).serve(sessions, stop, None)  # type: ignore[arg-type]
    assert engine.patience == [math.inf]


def test_a_whole_head_has_one_lane_and_larger_chunks_unless_told_otherwise() -> None:
    whole = engine_options(HeadSettings(model="m", whole=True), "float32")
    assert (whole.whole, whole.lanes, whole.adapt_lanes, whole.prefill_chunk) == (True, 1, False, 256)
    told = engine_options(HeadSettings(model="m", whole=True, lanes=3, prefill_chunk=32), "float32")
    assert (told.lanes, told.prefill_chunk) == (3, 32)
    split = engine_options(HeadSettings(model="m"), "float32")
    assert (split.whole, split.adapt_lanes, split.prefill_chunk, split.prefill_per_turn) == (False, True, 64, 1)
