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
        """Why this tail cannot serve us, naming both sides (tail's ≠ head's); None when it can."""
        found = tail.profile.differences(self.profile)
        if tail.split != self.split:
            found.append(f"split: {'not chosen yet' if tail.split is None else tail.split} ≠ {self.split}")
        if tail.slots < self.slots and not self.takes_fewer:
            found.append(f"slots: {tail.slots} < {self.slots}")
        if tail.max_query < self.max_query:
            found.append(f"max_query: {tail.max_query} < {self.max_query}")
        return f"tail {tail.tail} and head {self.head} differ: {'; '.join(found)}" if found else None

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
        #: what stands in the way now, for the error when the search is given up
        self.obstacle = "no tail is there"
        #: tails that failed us, the latest at the end
        self._failed: list[str] = []

    def failed(self, tail: str) -> None:
        """This tail died, fell silent or did not answer: try others before it."""
        self._failed = [*(other for other in self._failed if other != tail), tail]

    def find(self, stop: threading.Event) -> Session | None:
        """A session with a free tail that fits, or None, also once `stop` is set. Raises RelayError."""
        self.obstacle = "no tail is there"
        for tail in self._in_order(self._relay.tails()):
            if stop.is_set():
                return None
            misfit = self._offer.misfit(tail)
            session = None if misfit else self._try(tail, stop)
            if session is not None:
                return session
            if misfit:
                self.obstacle = misfit
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

    def _try(self, tail: TailInfo, stop: threading.Event) -> Session | None:
        """Open an epoch on this tail; what goes wrong with it must not keep us from the next one."""
        try:
            lease = self._relay.lease(self._offer.head, tail)
            if lease is None:
                self.obstacle = f"tail {tail.tail} is leased by another head"
                return None
            return self._open(lease, stop)
        except RelayUnreachable:
            raise
        except RelayError as error:
            self.failed(tail.tail)
            self.obstacle = f"tail {tail.tail}: {error}"
            return None

    def _open(self, lease: Lease, stop: threading.Event) -> Session | None:
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
        self.obstacle = refusal
        return None


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
