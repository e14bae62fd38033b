"""The seam between shardq and whatever carries its frames: Redis streams (`relay.streams`) or memory
(`relay.memory`). One contract test runs against both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from relay.messages import FRAME_VERSION, Downward, Hello, Upward
from relay.profile import Profile
from relay.room import Room

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class TailInfo:
    """What a tail announces while it lives."""

    #: unique per process
    tail: str
    profile: Profile
    #: None: the tail waits for a head to choose one, and has loaded nothing yet
    split: int | None
    slots: int
    max_query: int
    #: seconds since the epoch at which the tail's round loop last turned
    pulse: float
    #: what a tail that waits for its split has for it
    room: Room | None = None
    #: version of its frames
    frames: int = FRAME_VERSION


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    """A frame as it arrived."""

    lane: int
    message: M
    #: size of the encoded frame
    num_bytes: int
    #: `time.perf_counter` when it had arrived, however long it then waited to be taken
    at: float


class HeadLink(Protocol):
    """The head's end of one epoch."""

    @property
    def max_frame_bytes(self) -> int | None:
        """The longest frame that `send` takes, and that comes back; None: frames have no size."""

    def send(self, lane: int, message: Upward) -> int:
        """Hand over a frame and return its size in bytes. Never waits for the other side."""

    def receive(self, timeout_s: float) -> Received[Downward] | None:
        """The next frame of any lane; None after `timeout_s`, or earlier after `wake`.

        Raises `LinkLost` when the transport broke.
        """

    def wake(self) -> None:
        """From any thread: the present `receive`, else the next one, returns None without waiting further."""

    def close(self) -> None:
        """Stop reading and writing; safe to call twice."""


class TailLink(Protocol):
    """The tail's end of one epoch."""

    def send(self, lane: int, message: Downward) -> int:
        """As `HeadLink.send`."""

    def receive(self, timeout_s: float) -> Received[Upward] | None:
        """As `HeadLink.receive`; a malformed frame is dropped with a logged reason, never raised."""

    def close(self) -> None:
        """As `HeadLink.close`."""


class Announcement(Protocol):
    """A tail's presence, kept alive by a thread until closed."""

    def pulse(self) -> None:
        """Tell that the round loop turned."""

    def close(self) -> None:
        """Withdraw the presence at once."""


class Lease(Protocol):
    """A head's exclusive, self-renewing right to one tail. Each lease is a new epoch."""

    @property
    def tail(self) -> TailInfo: ...

    @property
    def epoch(self) -> int: ...

    def held(self) -> bool:
        """False once the lease lapsed, was taken over, or the tail's presence ended."""

    def release(self) -> None:
        """Give the tail back; safe to call twice."""


class SplitClaim(Protocol):
    """A head's word on where its model is cut, kept alive by a thread until closed."""

    @property
    def split(self) -> int:
        """The split that holds: that of the head that was first."""

    def close(self) -> None:
        """Let the word lapse, as soon as no other head keeps it; safe to call twice."""


class HeadRelay(Protocol):
    """What a head asks of the relay."""

    def tails(self) -> list[TailInfo]:
        """The tails that live now, leased or not."""

    def lease(self, head: str, tail: TailInfo) -> Lease | None:
        """Lease this tail and open a new epoch, or None if another head holds it."""

    def connect(self, lease: Lease, hello: Hello) -> HeadLink:
        """Send `hello` and return this end of the epoch. The tail's first frame on lane 0 answers it."""


class Relay(HeadRelay, Protocol):
    """One process' access to the relay."""

    def claim_split(self, profile: Profile, split: int) -> SplitClaim:
        """Head: make known where models of this profile are cut, unless another living head has done so."""

    def split_of(self, profile: Profile) -> int | None:
        """Where living heads cut models of this profile; None if there are none."""

    def announce(self, tail: TailInfo) -> Announcement:
        """Tail: make this tail known until the announcement is closed."""

    def await_hello(self, tail: str, after_epoch: int, timeout_s: float) -> Hello | None:
        """Tail: the newest hello with an epoch above `after_epoch`, or None after `timeout_s`."""

    def accept(self, tail: str, hello: Hello) -> TailLink:
        """Tail: its end of the epoch that `hello` opened."""

    def close(self) -> None:
        """Close every connection and thread of this process' relay."""
