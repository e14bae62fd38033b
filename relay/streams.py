"""The relay over Redis streams.

Per epoch, lane and direction there is one stream with one writer and one reader, each on a connection of its
own: over a slow link every command that is waited for costs a round trip, so writers do not wait
(`relay.writer`) and readers always have a read outstanding (`relay.reader`). No consumer groups: there is one
reader.

The head creates an epoch's streams and keeps renewing their short life; nobody else can create them, so an
epoch that was ended, superseded or lost with the server's memory is noticed by both sides as a missing
stream.

Rights: `relay.acl` holds the complete lists. A tail reads the `…:up` and writes the `…:down` streams of its own
ids and keeps its own presence key; it has no `EXPIRE`, `DEL` or scripts.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import redis

from relay import keys
from relay.codec import decode, encode
from relay.connections import SETTING, Connections
from relay.databases import found_elsewhere, wrong_number
from relay.errors import FrameInvalid, LinkLost
from relay.inbox import Inbox, log
from relay.messages import Downward, Error, Hello, Message, Prefill, Release, Round, Upward, Verdict, Welcome
from relay.presence import MAX_EPOCH, RedisAnnouncement, RedisLease, living_tails, take_lease
from relay.probe import Leg, measure
from relay.profile import Profile
from relay.reader import FrameReader
from relay.settings import RelaySettings
from relay.splits import RedisSplitClaim, claimed_split
from relay.tls import address_of
from relay.transport import Announcement, HeadLink, Lease, Received, SplitClaim, TailInfo, TailLink
from relay.writer import FIRST_ENTRY_ID, FRAME_FIELD, FrameWriter

#: most hellos read with one command; a head leaves one
HELLOS_AT_ONCE = 16

R = TypeVar("R", bound=Message)
S = TypeVar("S", bound=Message)


class _Closable(Protocol):
    def close(self) -> None: ...


class RedisLink(Generic[S, R]):
    """Either end of an epoch: sends messages `S`, receives messages `R`."""

    def __init__(
        self,
        connections: Connections,
        inbox: Inbox[R],
        out_keys: Sequence[str],
        in_keys: Sequence[str],
        settings: RelaySettings,
        renewed: Callable[[int], tuple[tuple[str, int], ...]] = lambda lane: (),
        *,
        compress: bool = False,
    ) -> None:
        """`out_keys` and `in_keys` by lane; `renewed(lane)` are the keys that this end keeps alive."""
        self._inbox = inbox
        self._compress = compress
        self.max_frame_bytes = settings.max_frame_bytes
        self._writers = [
            FrameWriter(
                connections,
                key,
                frames_kept=settings.frames_kept,
                patience_s=settings.patience_s,
                lost=self._lose,
                renew=renewed(lane),
            )
            for lane, key in enumerate(out_keys)
        ]
        readers = [
            FrameReader(
                connections,
                key,
                block_s=settings.block_s,
                patience_s=settings.patience_s,
                deliver=partial(inbox.deliver, lane),
                lost=self._lose,
            )
            for lane, key in enumerate(in_keys)
        ]

        self._ends: list[FrameWriter | FrameReader] = [*self._writers, *readers]

    def open(self) -> None:
        """Open every connection, all at once, and start. Raises `RelayUnreachable` or `RelayRefused`."""
        try:
            with ThreadPoolExecutor(len(self._ends), thread_name_prefix="relay-open") as pool:
                list(pool.map(lambda end: end.open(), self._ends))
        except BaseException:
            self.close()
            raise
        for end in self._ends:
            end.start()

    def send(self, lane: int, message: S) -> int:
        """Raises `FrameInvalid` for what the other side would drop; after a loss the frame goes nowhere."""
        frame = encode(message, self.max_frame_bytes, compress=self._compress)
        self._writers[lane].send(frame)
        return len(frame)

    def receive(self, timeout_s: float) -> Received[R] | None:
        return self._inbox.receive(timeout_s)

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        self._lose(LinkLost("the link was closed"))
        for end in self._ends:
            end.join()

    def _lose(self, error: LinkLost) -> None:
        if self._inbox.lose(error):
            for end in self._ends:
                end.stop()


class RedisRelay:
    """One process' access to the relay on a Redis server; implements `transport.Relay`.

    Every method may raise `RelayUnreachable` (try later) or `RelayRefused` (do not).
    """

    def __init__(
        self,
        url: str,
        *,
        allow_insecure: bool = False,
        compress: bool = False,
        settings: RelaySettings | None = None,
    ) -> None:
        """`compress`: shrink the tensors that we send. `settings.url` is not used.

        Raises `RelayRefused` for an address that `tls.address_of` refuses.
        """
        self._compress = compress
        self._settings = settings or RelaySettings()
        address = address_of(url, self._settings.tls_ca, allow_insecure=allow_insecure)
        # some tries must fit into the life of what they keep alive
        answer_timeout_s = max(0.5, self._settings.ttl_s / 4)
        read_timeout_s = self._settings.block_s + self._settings.patience_s / 2
        self._connections = Connections(address, answer_timeout_s=answer_timeout_s, read_timeout_s=read_timeout_s)
        #: tail → newest epoch whose hello was seen
        self._epochs_seen: dict[str, int] = {}
        self._open: weakref.WeakSet[_Closable] = weakref.WeakSet()
        self._leases: weakref.WeakSet[RedisLease] = weakref.WeakSet()

    def ping(self) -> float:
        """Seconds of one round trip to the server on a warm connection."""
        with self._connections.translated():
            self._connections.client.ping()
            before = time.perf_counter()
            self._connections.client.ping()
        return time.perf_counter() - before

    def probe(self) -> Leg:
        """How fast this machine's own way to the server is; takes about two seconds."""
        return measure(self._connections)

    def announce(self, tail: TailInfo) -> Announcement:
        """Raises `RelayRefused` too if `tail.tail` is no id of `keys.new_tail_id`."""
        keys.tail_name(tail.tail)
        announcement = RedisAnnouncement(
            self._connections, tail, lambda: self._epochs_seen.get(tail.tail, 0), self._settings
        )
        self._open.add(announcement)
        return announcement

    def await_hello(self, tail: str, after_epoch: int, timeout_s: float) -> Hello | None:
        """Costs at least one round trip to the server, also with `timeout_s` 0."""
        deadline = time.monotonic() + timeout_s
        while True:
            block_ms = int(min(self._settings.block_s, deadline - time.monotonic()) * 1000)
            # BLOCK 0 would wait for ever
            entries = self._read_hello(tail, after_epoch, block_ms if block_ms > 0 else None)
            for entry_id, data in entries:
                after_epoch = int(entry_id.split(b"-")[0])
                if after_epoch <= MAX_EPOCH:
                    # dropped or not: the next lease must count above it, or its hello could not be written
                    self._epochs_seen[tail] = max(after_epoch, self._epochs_seen.get(tail, 0))
                hello = _decode_hello(tail, after_epoch, data)
                if hello is not None:
                    return hello
            if time.monotonic() >= deadline:
                return None

    def accept(self, tail: str, hello: Hello) -> TailLink:
        self._epochs_seen[tail] = max(hello.epoch, self._epochs_seen.get(tail, 0))
        inbox: Inbox[Upward] = Inbox(
            (Prefill, Round, Release),
            f"epoch {hello.epoch} of head {hello.head}",
            self._settings.max_frame_bytes,
        )
        ups, downs = _lane_keys(tail, hello)
        link: RedisLink[Downward, Upward] = RedisLink(self._connections, inbox, downs, ups, self._settings)
        link.open()
        self._open.add(link)
        return link

    def tails(self) -> list[TailInfo]:
        return living_tails(self._connections)

    def wrong_database(self) -> str | None:
        """What is wrong with the address's database number, if no tail is in this database and some are in another."""
        client = self._connections.client
        with self._connections.translated():
            number = found_elsewhere(client, lambda each: any(True for _ in each.scan_iter(match=keys.TAILS_PATTERN)))
        return None if number is None else wrong_number(client, number, SETTING)

    def claim_split(self, profile: Profile, split: int) -> SplitClaim:
        claim = RedisSplitClaim(self._connections, profile, split, self._settings)
        self._open.add(claim)
        return claim

    def split_of(self, profile: Profile) -> int | None:
        return claimed_split(self._connections, profile)

    def lease(self, head: str, tail: TailInfo) -> Lease | None:
        """None too if the tail is gone."""
        lease = take_lease(self._connections, head, tail.tail, self._settings)
        if lease is not None:
            self._leases.add(lease)
        return lease

    def connect(self, lease: Lease, hello: Hello) -> HeadLink:
        """Raises `LinkLost` if a newer epoch was opened on this tail."""
        if hello.epoch != lease.epoch:
            raise ValueError(f"hello of epoch {hello.epoch} for a lease of epoch {lease.epoch}")
        tail, ttl_s = lease.tail.tail, self._settings.stream_ttl_s
        ups, downs = _lane_keys(tail, hello)
        self._create_streams([*ups, *downs])
        inbox: Inbox[Downward] = Inbox(
            (Welcome, Verdict, Error), f"epoch {hello.epoch} of tail {tail}", self._settings.max_frame_bytes
        )
        link: RedisLink[Upward, Downward] = RedisLink(
            self._connections,
            inbox,
            ups,
            downs,
            self._settings,
            renewed=lambda lane: ((ups[lane], ttl_s), (downs[lane], ttl_s)),
            compress=self._compress,
        )
        link.open()
        try:
            self._send_hello(tail, hello)
        except BaseException:
            link.close()
            raise
        self._open.add(link)
        return link

    def close(self) -> None:
        """Announcements are withdrawn, leases released, links closed."""
        for closable in list(self._open):
            closable.close()
        for lease in list(self._leases):
            lease.release()
        self._connections.close()

    def _read_hello(self, tail: str, after_epoch: int, block_ms: int | None) -> list[tuple[bytes, bytes]]:
        """(entry id, frame) of the hellos above `after_epoch`."""
        streams = {keys.hello(tail): f"{after_epoch}-0"}
        with self._connections.translated():
            reply = self._connections.reading.xread(streams, count=HELLOS_AT_ONCE, block=block_ms)  # type: ignore[arg-type]
        found = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply or [])
        return [(entry_id, fields.get(FRAME_FIELD, b"")) for _, entries in found for entry_id, fields in entries]

    def _create_streams(self, names: list[str]) -> None:
        with self._connections.translated(), self._connections.client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.xadd(name, {FRAME_FIELD: b""}, id=FIRST_ENTRY_ID.decode())
                pipeline.expire(name, self._settings.stream_ttl_s)
            _execute_newest(pipeline)

    def _send_hello(self, tail: str, hello: Hello) -> None:
        key = keys.hello(tail)
        with self._connections.translated(), self._connections.client.pipeline(transaction=False) as pipeline:
            pipeline.xadd(key, {FRAME_FIELD: encode(hello)}, id=f"{hello.epoch}-0", maxlen=1, approximate=False)
            pipeline.expire(key, self._settings.stream_ttl_s)
            _execute_newest(pipeline)


def _execute_newest(pipeline: redis.client.Pipeline) -> None:
    """Run a pipeline of XADDs that are refused once a newer epoch, or this one, was opened."""
    try:
        pipeline.execute()
    except redis.ResponseError as error:
        if "equal or smaller" not in str(error):
            raise
        raise LinkLost("this epoch was opened before, or a newer one was") from error


def _lane_keys(tail: str, hello: Hello) -> tuple[list[str], list[str]]:
    """The streams up and down, by lane."""
    lanes = range(hello.lanes)
    return [keys.up(tail, hello.epoch, n) for n in lanes], [keys.down(tail, hello.epoch, n) for n in lanes]


def _decode_hello(tail: str, epoch: int, data: bytes) -> Hello | None:
    try:
        message = decode(data)
    except FrameInvalid as error:
        log.warning("tail %s: hello of epoch %d dropped: %s", tail, epoch, error)
        return None
    if not isinstance(message, Hello) or message.epoch != epoch:
        log.warning("tail %s: entry %d of the hello stream is no hello of that epoch, dropped", tail, epoch)
        return None
    return message
