"""The relay's twin in memory: both halves in one process, or tests without a server.

A `MemoryHub` plays the server; every `MemoryRelay` made on it is one process' access. Frames pass through the
codec as they do over Redis, so sizes and refusals are the same. Nothing expires by itself: `MemoryHub.vanish`
plays the death of a tail, `MemoryHub.forget_lease` that of a head, `MemoryHub.lose` the death of the server.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from relay.codec import MAX_FRAME_BYTES, encode
from relay.errors import LinkLost
from relay.inbox import Inbox
from relay.messages import Downward, Error, Hello, Message, Prefill, Release, Round, Upward, Verdict, Welcome
from relay.profile import Profile
from relay.transport import Announcement, HeadLink, Lease, Received, SplitClaim, TailInfo, TailLink

R = TypeVar("R", bound=Message)
S = TypeVar("S", bound=Message)


@dataclass(slots=True)
class _Epoch:
    """What the server knows of an open epoch."""

    hello: Hello
    up: Inbox[Upward]
    down: Inbox[Downward]

    def end(self, reason: str) -> None:
        self.up.lose(LinkLost(reason))
        self.down.lose(LinkLost(reason))


class MemoryHub:
    """The shared state of all `MemoryRelay`s that can see each other."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.changed = threading.Condition()
        self.tails: dict[str, TailInfo] = {}
        self.leases: dict[str, MemoryLease] = {}
        self.counters: dict[str, int] = {}
        self.epochs: dict[str, _Epoch] = {}
        #: of every profile; the first one holds
        self.claims: dict[Profile, list[MemorySplitClaim]] = {}

    def vanish(self, tail: str) -> None:
        """The tail's presence lapses, as after a kill."""
        with self.changed:
            self.tails.pop(tail, None)

    def forget_lease(self, tail: str) -> None:
        """The lease of the tail lapses, as after the kill of its head."""
        with self.changed:
            self.leases.pop(tail, None)

    def lose(self, tail: str, reason: str = "the relay lost its data") -> None:
        """The tail's open epoch ends on both sides, as after a restart of the server."""
        with self.changed:
            epoch = self.epochs.pop(tail, None)
        if epoch is not None:
            epoch.end(reason)


class MemoryAnnouncement:
    """Implements `transport.Announcement`."""

    def __init__(self, hub: MemoryHub, tail: TailInfo) -> None:
        self._hub = hub
        self._tail = tail
        with hub.changed:
            hub.tails[tail.tail] = tail

    def pulse(self) -> None:
        with self._hub.changed:
            if self._tail.tail in self._hub.tails:
                self._hub.tails[self._tail.tail] = replace(self._tail, pulse=time.time())

    def close(self) -> None:
        self._hub.vanish(self._tail.tail)


class MemorySplitClaim:
    """Implements `transport.SplitClaim`."""

    def __init__(self, hub: MemoryHub, profile: Profile, split: int) -> None:
        self._hub = hub
        self._profile = profile
        #: holds once this claim comes first
        self.wanted = split
        with hub.changed:
            held = hub.claims.setdefault(profile, [])
            self._split = held[0].wanted if held else split
            held.append(self)

    @property
    def split(self) -> int:
        return self._split

    def close(self) -> None:
        with self._hub.changed:
            held = self._hub.claims.get(self._profile, [])
            if self in held:
                kept = held[0].wanted
                held.remove(self)
                held.sort(key=lambda claim: claim.wanted != kept)  # whoever cuts alike keeps the word


class MemoryLease:
    """Implements `transport.Lease`."""

    def __init__(self, hub: MemoryHub, tail: TailInfo, epoch: int) -> None:
        self._hub = hub
        self._tail = tail
        self._epoch = epoch

    @property
    def tail(self) -> TailInfo:
        return self._tail

    @property
    def epoch(self) -> int:
        return self._epoch

    def held(self) -> bool:
        with self._hub.changed:
            return self._hub.leases.get(self._tail.tail) is self and self._tail.tail in self._hub.tails

    def release(self) -> None:
        with self._hub.changed:
            if self._hub.leases.get(self._tail.tail) is not self:
                return
            del self._hub.leases[self._tail.tail]
        self._hub.lose(self._tail.tail, "the head gave the tail back")


class MemoryLink(Generic[S, R]):
    """Either end of an epoch: sends messages `S`, receives messages `R`."""

    def __init__(
        self,
        lanes: int,
        inbox: Inbox[R],
        deliver: Callable[[int, bytes], None],
        max_bytes: int = MAX_FRAME_BYTES,
        *,
        compress: bool = False,
    ) -> None:
        self._lanes = range(lanes)
        self._inbox = inbox
        self._deliver = deliver
        self.max_frame_bytes = max_bytes
        self._compress = compress
        self._closed = False

    def send(self, lane: int, message: S) -> int:
        """Raises `FrameInvalid` for what the other side would drop; after a loss the frame goes nowhere."""
        frame = encode(message, self.max_frame_bytes, compress=self._compress)
        lane = self._lanes[lane]
        if not self._closed:
            self._deliver(lane, frame)
        return len(frame)

    def receive(self, timeout_s: float) -> Received[R] | None:
        return self._inbox.receive(timeout_s)

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        self._closed = True
        self._inbox.lose(LinkLost("the link was closed"))


class _Closable(Protocol):
    def close(self) -> None: ...


class MemoryRelay:
    """One process' access to a `MemoryHub`; implements `transport.Relay`."""

    def __init__(self, hub: MemoryHub, *, compress: bool = False) -> None:
        self._hub = hub
        self._compress = compress
        #: a presence stands until it is withdrawn, whether or not its maker keeps the announcement
        self._announcements: list[MemoryAnnouncement] = []
        self._claims: list[MemorySplitClaim] = []
        self._links: weakref.WeakSet[_Closable] = weakref.WeakSet()
        self._leases: weakref.WeakSet[MemoryLease] = weakref.WeakSet()

    def announce(self, tail: TailInfo) -> Announcement:
        announcement = MemoryAnnouncement(self._hub, tail)
        self._announcements.append(announcement)
        return announcement

    def await_hello(self, tail: str, after_epoch: int, timeout_s: float) -> Hello | None:
        def newer() -> Hello | None:
            epoch = self._hub.epochs.get(tail)
            return epoch.hello if epoch is not None and epoch.hello.epoch > after_epoch else None

        with self._hub.changed:
            return self._hub.changed.wait_for(newer, max(0.0, timeout_s))

    def accept(self, tail: str, hello: Hello) -> TailLink:
        with self._hub.changed:
            epoch = self._hub.epochs.get(tail)
        if epoch is None or epoch.hello != hello:
            epoch = self._new_epoch(tail, hello)
            epoch.end("the epoch was ended by the other side")
        link: MemoryLink[Downward, Upward] = MemoryLink(
            hello.lanes, epoch.up, epoch.down.deliver, self._hub.max_frame_bytes
        )
        self._links.add(link)
        return link

    def tails(self) -> list[TailInfo]:
        with self._hub.changed:
            return [self._hub.tails[tail] for tail in sorted(self._hub.tails)]

    def claim_split(self, profile: Profile, split: int) -> SplitClaim:
        claim = MemorySplitClaim(self._hub, profile, split)
        self._claims.append(claim)
        return claim

    def split_of(self, profile: Profile) -> int | None:
        with self._hub.changed:
            held = self._hub.claims.get(profile)
            return held[0].wanted if held else None

    def lease(self, head: str, tail: TailInfo) -> Lease | None:
        """None too if the tail is gone."""
        name = tail.tail
        with self._hub.changed:
            present = self._hub.tails.get(name)
            if present is None or name in self._hub.leases:
                return None
            self._hub.counters[name] = self._hub.counters.get(name, 0) + 1
            lease = MemoryLease(self._hub, present, self._hub.counters[name])
            self._hub.leases[name] = lease
        self._hub.lose(name, "a newer epoch was opened")
        self._leases.add(lease)
        return lease

    def connect(self, lease: Lease, hello: Hello) -> HeadLink:
        """Raises `LinkLost` if a newer epoch was opened on this tail."""
        if hello.epoch != lease.epoch:
            raise ValueError(f"hello of epoch {hello.epoch} for a lease of epoch {lease.epoch}")
        tail = lease.tail.tail
        with self._hub.changed:
            if self._hub.counters.get(tail, 0) != hello.epoch or tail in self._hub.epochs:
                raise LinkLost("this epoch was opened before, or a newer one was")
            epoch = self._new_epoch(tail, hello)
            self._hub.epochs[tail] = epoch
            self._hub.changed.notify_all()
        link: MemoryLink[Upward, Downward] = MemoryLink(
            hello.lanes, epoch.down, epoch.up.deliver, self._hub.max_frame_bytes, compress=self._compress
        )
        self._links.add(link)
        return link

    def close(self) -> None:
        """Announcements and claims are withdrawn, leases released, links closed."""
        for announcement in self._announcements:
            announcement.close()
        for claim in self._claims:
            claim.close()
        for link in self._links:
            link.close()
        for lease in list(self._leases):
            lease.release()

    def _new_epoch(self, tail: str, hello: Hello) -> _Epoch:
        limit = self._hub.max_frame_bytes
        up: Inbox[Upward] = Inbox((Prefill, Round, Release), f"epoch {hello.epoch} of head {hello.head}", limit)
        down: Inbox[Downward] = Inbox((Welcome, Verdict, Error), f"epoch {hello.epoch} of tail {tail}", limit)
        return _Epoch(hello, up, down)
