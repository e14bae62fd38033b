"""Finding a tail and opening an epoch on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from relay.errors import LinkLost, RelayError, RelayUnreachable
from relay.messages import Error, Hello, Welcome
from relay.profile import Profile
from relay.transport import HeadLink, HeadRelay, Lease, TailInfo
from workers.agreement import NO_TAIL_THERE, Difference, misfit, profile_differences

log = logging.getLogger(__name__)

#: how often a head without a tail looks for one
SEARCH_EVERY_S = 0.5
#: how long a tail may take to answer a hello
WELCOME_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """What a head asks of a tail."""

    head: str
    profile: Profile
    split: int
    slots: int
    lanes: int
    max_query: int
    #: a tail with fewer slots will do: no more than that are used then
    takes_fewer: bool = False

    def misfit(self, tail: TailInfo) -> str | None:
        """Why this tail cannot serve us, naming both sides (tail's ≠ head's), and what to do; None when it can."""
        found = profile_differences(tail, self.profile)
        if tail.split != self.split:
            chosen = "not chosen yet" if tail.split is None else tail.split
            found.append(Difference("split", f"split: {chosen} ≠ {self.split}"))
        if tail.slots < self.slots and not self.takes_fewer:
            found.append(Difference("slots", f"slots: {tail.slots} < {self.slots}"))
        if tail.max_query < self.max_query:
            found.append(Difference("max_query", f"max_query: {tail.max_query} < {self.max_query}"))
        return misfit(tail, f"head {self.head}", found)

    def slots_on(self, tail: TailInfo) -> int:
        """Slots that are used with this tail."""
        return min(self.slots, tail.slots)

    def hello(self, lease: Lease) -> Hello:
        """The frame that opens a lease's epoch."""
        slots = self.slots_on(lease.tail)
        return Hello(self.head, lease.epoch, self.lanes, self.profile, self.split, slots, self.max_query)


@dataclass(frozen=True, slots=True)
class Session:
    """An open epoch: the right to a tail and the link to it."""

    lease: Lease
    link: HeadLink
    #: slots that both sides have
    slots: int

    def close(self) -> None:
        """Give both back."""
        self.link.close()
        self.lease.release()


class TailSearch:
    """Looks for a free tail that fits, and says what stands in the way.

    Tails that failed us come last, the one that failed longest ago before the others: a standby gets its turn.
    """

    def __init__(self, relay: HeadRelay, offer: HeadOffer) -> None:
        self._relay = relay
        self._offer = offer
        #: what stands in the way now, in words; None once a tail is found
        self.obstacle: str | None = NO_TAIL_THERE
        #: tails that failed us, the latest at the end
        self._failed: list[str] = []

    def failed(self, tail: str) -> None:
        """This tail died, fell silent or did not answer: try others before it."""
        self._failed = [*(other for other in self._failed if other != tail), tail]

    def find(self, stop: threading.Event) -> Session | None:
        """A session with a free tail that fits, or None, also once `stop` is set. Raises RelayError."""
        obstacles = []
        for tail in self._in_order(self._relay.tails()):
            if stop.is_set():
                return None
            found = self._offer.misfit(tail) or self._try(tail, stop)
            if isinstance(found, Session):
                self.obstacle = None
                return found
            obstacles.append(found)
        self.obstacle = "; ".join(obstacles) or NO_TAIL_THERE
        return None

    def wait(
        self, stop: threading.Event, timeout_s: float | None, meanwhile: Callable[[], None] = lambda: None
    ) -> Session | None:
        """Search until a tail is found, `stop` is set or `timeout_s` have passed (then None).

        A relay that is away, or refuses something, is one more obstacle. `meanwhile` is called between two looks.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        said: str | None = None
        while not stop.is_set() and (deadline is None or time.monotonic() < deadline):
            try:
                session = self.find(stop)
            except RelayError as error:
                session, self.obstacle = None, str(error)
            if session is not None:
                return session
            if said != self.obstacle:
                said = self.obstacle
                log.warning("%s: taking no jobs until a fitting tail is free", self.obstacle)
            meanwhile()
            stop.wait(SEARCH_EVERY_S)
        return None

    def _in_order(self, tails: list[TailInfo]) -> list[TailInfo]:
        there = {tail.tail for tail in tails}
        self._failed = [tail for tail in self._failed if tail in there]
        places = {tail: place for place, tail in enumerate(self._failed)}
        return sorted(tails, key=lambda tail: places.get(tail.tail, -1))

    def _try(self, tail: TailInfo, stop: threading.Event) -> Session | str:
        """Open an epoch on this tail, or say why not; that must not keep us from the next one."""
        try:
            lease = self._relay.lease(self._offer.head, tail)
            if lease is None:
                return f"tail {tail.tail} is leased by another head (start another `shardq tail`)"
            return self._open(lease, stop)
        except RelayUnreachable:
            raise
        except RelayError as error:
            self.failed(tail.tail)
            return f"tail {tail.tail}: {error}"

    def _open(self, lease: Lease, stop: threading.Event) -> Session | str:
        try:
            link = self._relay.connect(lease, self._offer.hello(lease))
        except BaseException:
            lease.release()  # it would renew itself for ever
            raise
        slots = self._offer.slots_on(lease.tail)
        session = Session(lease, link, slots)
        try:
            refusal = await_welcome(session, WELCOME_TIMEOUT_S, stop)
        except LinkLost as error:
            refusal = str(error)
        if refusal is None:
            if slots < self._offer.slots:
                log.info("tail %s has %d slots: using so many of our %d", lease.tail.tail, slots, self._offer.slots)
            return session
        session.close()
        self.failed(lease.tail.tail)
        return refusal


def await_welcome(session: Session, timeout_s: float, stop: threading.Event) -> str | None:
    """Wait for the answer to a hello: None if welcome, else the reason. Raises LinkLost."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stop.is_set() or not session.lease.held():
            return f"tail {session.lease.tail.tail} {'is not needed any more' if stop.is_set() else 'is gone'}"
        received = session.link.receive(0.2)
        if received is None:
            continue
        if isinstance(received.message, Welcome):
            return None
        if isinstance(received.message, Error):
            return received.message.message
    return f"the tail did not answer within {timeout_s:g} s"
