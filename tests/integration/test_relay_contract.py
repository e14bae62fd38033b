"""What every relay promises: the same tests against Redis streams and against memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import redis

from relay import keys
from relay.errors import FrameInvalid, LinkLost
from relay.memory import MemoryHub, MemoryRelay
from relay.messages import DTYPE_BYTES, Hello, Prefill, Release, Round, Sampling, Tensor, Verdict, Welcome
from relay.room import Room
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import HeadLink, Lease, Relay, TailInfo, TailLink
from tests.relay_messages import PROFILE, hello_for, round_of, tail_info, verdict_of

#: quick enough for tests: what lapses lapses within two seconds
QUICK = RelaySettings(ttl_s=1.5, refresh_s=0.2, block_s=0.5, patience_s=3.0)


@dataclass
class World:
    """A relay's server and the processes on it."""

    #: of a process that compresses, or not
    make: Callable[[bool], Relay]
    #: write bytes as if they were a frame of the other side
    inject: Callable[[TailInfo, Hello, int, bytes], None]
    made: list[Relay] = field(default_factory=list)

    def process(self, *, compress: bool = False) -> Relay:
        relay = self.make(compress)
        self.made.append(relay)
        return relay


@pytest.fixture(params=["redis", "memory"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "redis":
        url: str = request.getfixturevalue("redis_url")

        def inject(tail: TailInfo, hello: Hello, lane: int, data: bytes) -> None:
            with redis.Redis.from_url(url) as client:
                client.xadd(keys.up(tail.tail, hello.epoch, lane), {"f": data}, id="1-0")

        world = World(lambda compress: RedisRelay(url, compress=compress, settings=QUICK), inject)
    else:
        hub = MemoryHub()
        world = World(
            lambda compress: MemoryRelay(hub, compress=compress),
            lambda tail, hello, lane, data: hub.epochs[tail.tail].up.deliver(lane, data),
        )
    yield world
    for relay in world.made:
        relay.close()


@dataclass
class Linked:
    tail: TailInfo
    lease: Lease
    hello: Hello
    head_end: HeadLink
    tail_end: TailLink


def link(head: Relay, tail: Relay, lanes: int = 1, info: TailInfo | None = None) -> Linked:
    info = info or tail_info()
    tail.announce(info)
    lease = head.lease("gpu-a", info)
    assert lease is not None
    hello = hello_for(lease, lanes)
    head_end = head.connect(lease, hello)
    received = tail.await_hello(info.tail, 0, 5.0)
    assert received == hello
    return Linked(info, lease, hello, head_end, tail.accept(info.tail, received))


def loses(end: HeadLink | TailLink, within_s: float = 5.0) -> str:
    """The reason of the loss; whatever arrives before is skipped."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            end.receive(0.2)
        except LinkLost as lost:
            return str(lost)
    pytest.fail(f"the link was not lost within {within_s} s")


def test_an_announced_tail_is_seen_by_heads_until_it_closes(world: World) -> None:
    head, tail = world.process(), world.process()
    assert head.tails() == []
    first, second = tail_info("b"), tail_info("c")
    announcement = tail.announce(first)
    tail.announce(second)
    assert head.tails() == [first, second]
    announcement.close()
    announcement.close()
    time.sleep(0.05)
    assert head.tails() == [second]


def test_the_pulse_of_the_round_loop_reaches_heads(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    announcement = tail.announce(info)
    before = time.time()
    announcement.pulse()
    time.sleep(0.5)
    (seen,) = head.tails()
    assert seen.pulse >= before


def test_a_tail_that_waits_for_its_split_is_listed_with_its_room(world: World) -> None:
    head, tail = world.process(), world.process()
    info = replace(tail_info(), split=None, room=Room(10**10, 4096, 17, 4, 0.001, 0.5))
    tail.announce(info)
    assert head.tails() == [info]


def test_the_split_that_a_head_claims_is_known_as_long_as_it_keeps_it(world: World) -> None:
    head, tail = world.process(), world.process()
    assert tail.split_of(PROFILE) is None
    claim = head.claim_split(PROFILE, 7)
    assert claim.split == 7
    time.sleep(2 * QUICK.ttl_s)
    assert tail.split_of(PROFILE) == 7
    assert tail.split_of(replace(PROFILE, quantization="nf4")) is None
    claim.close()
    claim.close()
    time.sleep(1.2 * QUICK.ttl_s)
    assert tail.split_of(PROFILE) is None


def test_the_first_heads_split_holds_until_no_head_keeps_it_and_then_the_next_ones(world: World) -> None:
    first, second, third = (world.process() for _ in range(3))
    claims = [first.claim_split(PROFILE, 7), second.claim_split(PROFILE, 9), third.claim_split(PROFILE, 7)]
    assert [claim.split for claim in claims] == [7, 7, 7]
    claims[0].close()
    time.sleep(2 * QUICK.ttl_s)
    assert second.split_of(PROFILE) == 7
    third.close()
    time.sleep(2 * QUICK.ttl_s)
    assert first.split_of(PROFILE) == 9


def test_a_leased_tail_is_still_listed_but_leased_once(world: World) -> None:
    head, other, tail = world.process(), world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    assert lease.held()
    assert lease.tail == info
    assert other.lease("other", info) is None
    assert head.lease("a", info) is None
    assert head.tails() == [info]


def test_a_released_tail_can_be_leased_again_in_a_higher_epoch(world: World) -> None:
    head, other, tail = world.process(), world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    first = head.lease("a", info)
    assert first is not None
    first.release()
    first.release()
    assert not first.held()
    second = other.lease("b", info)
    assert second is not None
    assert second.epoch > first.epoch
    first.release()
    assert second.held()


def test_a_tail_that_is_gone_cannot_be_leased(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    tail.announce(info).close()
    time.sleep(0.05)
    assert head.lease("a", info) is None


def test_a_lease_ends_with_its_tail(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    announcement = tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    time.sleep(2.0)
    assert lease.held()
    announcement.close()
    time.sleep(0.6)
    assert not lease.held()


def test_hello_reaches_a_waiting_tail(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    hello = hello_for(lease, lanes=3)
    opener = threading.Timer(0.2, lambda: head.connect(lease, hello))
    opener.start()
    started = time.monotonic()
    assert tail.await_hello(info.tail, 0, 10.0) == hello
    assert time.monotonic() - started < 5.0
    opener.join()


def test_only_a_newer_hello_is_answered(world: World) -> None:
    head, tail = world.process(), world.process()
    linked = link(head, tail)
    started = time.monotonic()
    assert tail.await_hello(linked.tail.tail, linked.hello.epoch, 0.0) is None
    assert tail.await_hello(linked.tail.tail, linked.hello.epoch, 0.3) is None
    assert time.monotonic() - started < 2.0
    linked.lease.release()
    lease = head.lease("gpu-a", linked.tail)
    assert lease is not None
    newer = hello_for(lease)
    head.connect(lease, newer)
    assert tail.await_hello(linked.tail.tail, linked.hello.epoch, 2.0) == newer


def test_frames_arrive_in_order_whole_and_on_their_lane(world: World) -> None:
    linked = link(world.process(), world.process(), lanes=2)
    for number in range(20):
        size = linked.head_end.send(number % 2, round_of(number, 3000))
        received = linked.tail_end.receive(5.0)
        assert received is not None
        assert (received.lane, received.num_bytes) == (number % 2, size)
        assert received.message == round_of(number, 3000)
        linked.tail_end.send(received.lane, verdict_of(number))
        answer = linked.head_end.receive(5.0)
        assert answer is not None
        assert (answer.lane, answer.message) == (number % 2, verdict_of(number))


def test_several_frames_in_flight_keep_their_order(world: World) -> None:
    linked = link(world.process(), world.process())
    for number in range(30):
        linked.head_end.send(0, round_of(number, 100_000))
    numbers = []
    for _ in range(30):
        received = linked.tail_end.receive(5.0)
        assert received is not None
        assert isinstance(received.message, Round)
        numbers.append(received.message.number)
    assert numbers == list(range(30))


def test_what_was_sent_before_the_tail_accepted_is_not_lost(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    head_end = head.connect(lease, hello_for(lease))
    head_end.send(0, Release(1, 2, 3, 4))
    hello = tail.await_hello(info.tail, 0, 5.0)
    assert hello is not None
    time.sleep(0.2)
    received = tail.accept(info.tail, hello).receive(5.0)
    assert received is not None
    assert received.message == Release(1, 2, 3, 4)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_a_prefill_chunk_of_any_dtype_arrives_bit_for_bit(world: World, dtype: str) -> None:
    linked = link(world.process(), world.process())
    data = bytes(range(256)) * 16
    scales = bytes(range(16)) if dtype == "int8" else b""
    hidden = Tensor(dtype, (4, 1024 // DTYPE_BYTES[dtype]), data, scales)
    chunk = Prefill(1, 0, 1, 0, 0, 9, True, Sampling(0.7, 40, 0.9, 0.05, -5), None, hidden)
    linked.head_end.send(0, chunk)
    received = linked.tail_end.receive(5.0)
    assert received is not None
    assert received.message == chunk


def test_a_head_that_compresses_sends_fewer_bytes_and_the_tail_need_not_know(world: World) -> None:
    linked = link(world.process(compress=True), world.process())
    message = round_of(1, num_bytes=4096)
    num_bytes = linked.head_end.send(0, message)
    received = linked.tail_end.receive(5.0)
    assert received is not None
    assert (received.message, received.num_bytes) == (message, num_bytes)
    assert num_bytes < 1024


def test_a_waiting_receive_ends_when_it_is_woken_and_one_that_comes_later_does_not_wait(world: World) -> None:
    linked = link(world.process(), world.process())
    before = time.monotonic()
    timer = threading.Timer(0.1, linked.head_end.wake)
    timer.start()
    assert linked.head_end.receive(5.0) is None
    timer.join()
    linked.head_end.wake()
    linked.head_end.wake()
    assert linked.head_end.receive(5.0) is None
    assert time.monotonic() - before < 2.0
    linked.tail_end.send(0, verdict_of(1))
    received = linked.head_end.receive(5.0)
    assert received is not None
    assert received.message == verdict_of(1)


def test_a_frame_knows_when_it_arrived_however_late_it_is_taken(world: World) -> None:
    linked = link(world.process(), world.process())
    sent = time.perf_counter()
    linked.head_end.send(0, round_of(1))
    time.sleep(0.5)
    asked = time.perf_counter()
    received = linked.tail_end.receive(5.0)
    assert received is not None
    assert sent < received.at < asked - 0.1


def test_receive_waits_no_longer_than_it_may(world: World) -> None:
    linked = link(world.process(), world.process())
    for end in (linked.head_end, linked.tail_end):
        started = time.monotonic()
        assert end.receive(0.0) is None
        assert end.receive(0.2) is None
        assert time.monotonic() - started < 1.0


def test_a_malformed_frame_is_dropped_with_a_reason_and_the_next_one_arrives(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    linked = link(world.process(), world.process())
    with caplog.at_level(logging.WARNING):
        world.inject(linked.tail, linked.hello, 0, b"\x01\x00\x00\x00nonsense")
        assert linked.tail_end.receive(1.0) is None
    assert "dropped" in caplog.text


def test_a_frame_of_the_wrong_direction_is_dropped(world: World, caplog: pytest.LogCaptureFixture) -> None:
    linked = link(world.process(), world.process())
    with caplog.at_level(logging.WARNING):
        linked.tail_end.send(0, round_of(1))  # type: ignore[arg-type]
        linked.head_end.send(0, verdict_of(1))  # type: ignore[arg-type]
        linked.tail_end.send(0, Welcome(linked.tail.tail, linked.hello.epoch))
        received = linked.head_end.receive(5.0)
        assert linked.tail_end.receive(0.5) is None
    assert received is not None
    assert isinstance(received.message, Welcome)
    assert "Round does not belong in this direction" in caplog.text
    assert "Verdict does not belong in this direction" in caplog.text


def test_an_unencodable_message_is_refused_at_the_sender(world: World) -> None:
    linked = link(world.process(), world.process())
    with pytest.raises(FrameInvalid):
        linked.tail_end.send(0, Verdict(-1, (), 0.0))


def test_a_lane_that_does_not_exist_is_an_index_error(world: World) -> None:
    linked = link(world.process(), world.process(), lanes=2)
    with pytest.raises(IndexError):
        linked.head_end.send(2, round_of(1))


def test_the_other_side_learns_that_the_head_gave_the_tail_back(world: World) -> None:
    linked = link(world.process(), world.process())
    linked.head_end.send(0, round_of(1))
    linked.head_end.close()
    linked.lease.release()
    loses(linked.tail_end)


def test_a_new_lease_ends_the_old_epoch_on_both_sides(world: World) -> None:
    head, other, tail = world.process(), world.process(), world.process()
    linked = link(head, tail, lanes=2)
    linked.lease.release()
    lease = other.lease("other", linked.tail)
    assert lease is not None
    loses(linked.head_end)
    loses(linked.tail_end)
    second = other.connect(lease, hello_for(lease))
    hello = tail.await_hello(linked.tail.tail, linked.hello.epoch, 5.0)
    assert hello is not None
    accepted = tail.accept(linked.tail.tail, hello)
    linked.head_end.send(0, round_of(1))
    second.send(0, round_of(2))
    received = accepted.receive(5.0)
    assert received is not None
    assert received.message == round_of(2)


def test_a_stale_head_cannot_open_its_epoch_any_more(world: World) -> None:
    head, other, tail = world.process(), world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    stale = head.lease("a", info)
    assert stale is not None
    stale.release()
    lease = other.lease("b", info)
    assert lease is not None
    other.connect(lease, hello_for(lease))
    with pytest.raises(LinkLost):
        head.connect(stale, hello_for(stale))


def test_an_epoch_is_opened_once(world: World) -> None:
    linked = link(head := world.process(), world.process())
    with pytest.raises(LinkLost):
        head.connect(linked.lease, linked.hello)


def test_a_hello_of_another_epoch_than_the_lease_is_a_mistake(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    with pytest.raises(ValueError, match="epoch"):
        head.connect(lease, Hello("a", lease.epoch + 1, 1, PROFILE, 2, 8, 64))


def test_a_closed_link_is_lost_to_its_own_side_and_swallows_what_is_sent(world: World) -> None:
    linked = link(world.process(), world.process())
    linked.tail_end.close()
    linked.tail_end.close()
    assert "closed" in loses(linked.tail_end)
    assert linked.tail_end.send(0, verdict_of(1)) > 0
    linked.head_end.close()
    assert "closed" in loses(linked.head_end)
    assert linked.head_end.send(0, round_of(1)) > 0


def test_accepting_an_epoch_that_ended_gives_a_lost_link(world: World) -> None:
    head, tail = world.process(), world.process()
    info = tail_info()
    tail.announce(info)
    lease = head.lease("a", info)
    assert lease is not None
    head.connect(lease, hello_for(lease))
    hello = tail.await_hello(info.tail, 0, 5.0)
    assert hello is not None
    lease.release()
    loses(tail.accept(info.tail, hello))


def test_closing_a_relay_withdraws_its_tails_and_gives_back_its_leases(world: World) -> None:
    head, other, tail = world.process(), world.process(), world.process()
    linked = link(head, tail)
    head.close()
    assert not linked.lease.held()
    loses(linked.head_end)
    assert other.lease("b", linked.tail) is not None
    tail.close()
    time.sleep(0.05)
    assert other.tails() == []
