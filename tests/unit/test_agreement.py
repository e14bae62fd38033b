"""Head and tail come to one split, whichever starts first, and whoever comes later takes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from relay.memory import MemoryHub, MemoryRelay
from relay.room import Room
from relay.transport import TailInfo
from tests.relay_messages import PROFILE, tail_info
from workers import agreement
from workers.agreement import HeadsChoice, split_for_tail
from workers.engine.sizes import ModelSizes
from workers.errors import NoTail, SplitInvalid

SIZES = ModelSizes(24, 100, 300, 1, 300, 2, 0, 0)
PLENTY = Room(10**6, 0, 0, 1, 1.0, 0.0)
#: as fast as the others, but with room for the head's embeddings and 5 layers, or the tail's LM head and 5
TIGHT = replace(PLENTY, free_bytes=301 + 5 * 100)


class Field:
    """A relay, and workers that look for their split on it."""

    def __init__(self) -> None:
        self.hub, self.stop, self.pool = MemoryHub(), threading.Event(), ThreadPoolExecutor(8)

    def relay(self) -> MemoryRelay:
        return MemoryRelay(self.hub)

    def tail(self, room: Room = PLENTY) -> Future[int | None]:
        waiting = replace(tail_info(), split=None, room=room)
        return self.pool.submit(split_for_tail, self.relay(), waiting, SIZES, room, self.stop)

    def choice(self, room: Room = PLENTY) -> HeadsChoice:
        return HeadsChoice(self.relay(), PROFILE, SIZES, lambda: room)

    def head(self, room: Room = PLENTY) -> Future[int | None]:
        """Chooses and says so, as `workers.head.worker.settle` does."""

        def settle() -> int | None:
            split = self.choice(room).wait(self.stop, 20)
            return None if split is None else self.relay().claim_split(PROFILE, split).split

        return self.pool.submit(settle)

    def close(self) -> None:
        self.stop.set()
        self.pool.shutdown()


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    monkeypatch.setattr(agreement, "LOOK_EVERY_S", 0.01)
    return Field()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("first", ["head", "tail"])
def test_whichever_starts_first_both_take_what_both_memories_allow(field: Field, first: str) -> None:
    start = {"head": field.head, "tail": lambda: field.tail(TIGHT)}
    second = "tail" if first == "head" else "head"
    started = {first: start[first]()}
    time.sleep(0.05)
    assert not started[first].done()
    started[second] = start[second]()
    assert started["head"].result(10) == started["tail"].result(10) == 19
    assert field.hub.tails == {}  # it has loaded nothing yet
    field.close()


def test_a_tail_that_comes_later_takes_what_the_head_uses_and_so_does_another_head(field: Field) -> None:
    claim = field.relay().claim_split(PROFILE, 7)
    assert field.tail().result(10) == 7
    assert field.head().result(10) == 7
    assert field.tail(PLENTY).result(10) == 7
    claim.close()
    field.close()


def test_a_head_that_comes_back_takes_what_the_loaded_tail_has(field: Field) -> None:
    field.relay().announce(replace(tail_info("a"), split=9))
    waiting = field.tail()
    until(lambda: len(field.hub.tails) == 2)
    assert field.head().result(10) == 9
    assert waiting.result(10) == 9
    field.close()


def test_two_heads_that_choose_at_once_end_with_one_split(field: Field) -> None:
    waiting = field.tail()
    heads = [field.head(), field.head(replace(PLENTY, layer_s=2.0))]
    splits = {head.result(10) for head in heads}
    assert len(splits) == 1
    assert {waiting.result(10)} == splits
    field.close()


def test_every_tail_that_waits_is_counted(field: Field) -> None:
    tails = [field.tail(), field.tail(TIGHT)]
    until(lambda: len(field.hub.tails) == 2)
    assert field.head().result(10) == 19
    assert [tail.result(10) for tail in tails] == [19, 19]
    field.close()


def test_a_split_that_does_not_fit_a_machine_is_an_error_with_the_numbers(field: Field) -> None:
    field.relay().claim_split(PROFILE, 12)
    with pytest.raises(SplitInvalid, match="layers 12 to 23 and LM head with 1 slots need"):
        field.tail(TIGHT).result(10)
    with pytest.raises(SplitInvalid, match="embeddings and layers 0 to 11 with 1 slots need"):
        field.head(TIGHT).result(10)
    field.close()


def test_a_model_that_fits_nowhere_is_an_error_of_the_head(field: Field) -> None:
    field.tail(TIGHT)
    with pytest.raises(SplitInvalid, match="fit these machines nowhere"):
        field.head(TIGHT).result(10)
    field.close()


def other_model(info: TailInfo) -> TailInfo:
    return replace(info, split=3, profile=replace(PROFILE, quantization="nf4"))


@pytest.mark.parametrize("others", [False, True])
def test_without_a_tail_of_its_model_a_head_gives_up_in_time_and_says_why(field: Field, others: bool) -> None:
    if others:
        field.relay().announce(other_model(tail_info("b")))
    reason = (
        r"tail b-\w+ and head differ: quantization: nf4 ≠ none \(give both the same --quantization\)"
        if others
        else r"no tail is there \(start `shardq tail`\)"
    )
    with pytest.raises(NoTail, match=rf"{reason}; gave up after 0\.1 s"):
        field.choice().wait(field.stop, 0.1)


def test_whoever_is_told_to_stop_stops(field: Field) -> None:
    waiting, choosing = field.tail(), field.pool.submit(Field().choice().wait, field.stop, None)
    field.close()
    assert waiting.result(10) is None
    assert choosing.result(10) is None
