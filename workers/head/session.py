"""Finding a tail and opening an epoch on it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from relay.errors import LinkLost, RelayUnreachable
from relay.messages import Error, Hello, Welcome
from relay.profile import Profile
from relay.transport import HeadLink, Lease, Relay, TailInfo

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

    def misfit(self, tail: TailInfo) -> str | None:
        """Why this tail cannot serve us, naming both sides (tail's ≠ head's); None when it can."""
        found = tail.profile.differences(self.profile)
        if tail.split != self.split:
            found.append(f"split: {tail.split} ≠ {self.split}")
        if tail.slots < self.slots:
            found.append(f"slots: {tail.slots} < {self.slots}")
        if tail.max_query < self.max_query:
            found.append(f"max_query: {tail.max_query} < {self.max_query}")
        return f"tail {tail.tail} and head {self.head} differ: {'; '.join(found)}" if found else None

    def hello(self, epoch: int) -> Hello:
        """The frame that opens an epoch."""
        return Hello(self.head, epoch, self.lanes, self.profile, self.split, self.slots, self.max_query)


@dataclass(frozen=True, slots=True)
class Session:
    """An open epoch: the right to a tail and the link to it."""

    lease: Lease
    link: HeadLink

    def close(self) -> None:
        """Give both back."""
        self.link.close()
        self.lease.release()


class TailSearch:
    """Looks for a free tail that fits, and says what stands in the way."""

    def __init__(self, relay: Relay, offer: HeadOffer) -> None:
        self._relay = relay
        self._offer = offer
        #: what stands in the way now, for the error when the search is given up
        self.obstacle = "no tail is there"

    def find(self) -> Session | None:
        """A session with a free tail that fits, or None. Raises RelayUnreachable."""
        self.obstacle = "no tail is there"
        for tail in self._relay.tails():
            misfit = self._offer.misfit(tail)
            session = None if misfit else self._open(tail)
            if session is not None:
                return session
            if misfit:
                self.obstacle = misfit
        return None

    def wait(self, stop: threading.Event, timeout_s: float | None) -> Session | None:
        """Search until a tail is found, `stop` is set or `timeout_s` have passed (then None)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        said: str | None = None
        while not stop.is_set() and (deadline is None or time.monotonic() < deadline):
            try:
                session = self.find()
            except RelayUnreachable as error:
                session, self.obstacle = None, str(error)
            if session is not None:
                return session
            if said != self.obstacle:
                said = self.obstacle
                log.warning("%s: taking no jobs until a fitting tail is free", self.obstacle)
            stop.wait(SEARCH_EVERY_S)
        return None

    def _open(self, tail: TailInfo) -> Session | None:
        lease = self._relay.lease(self._offer.head, tail)
        if lease is None:
            self.obstacle = f"tail {tail.tail} is leased by another head"
            return None
        session = Session(lease, self._relay.connect(lease, self._offer.hello(lease.epoch)))
        try:
            refusal = await_welcome(session.link, WELCOME_TIMEOUT_S)
        except LinkLost as error:
            refusal = str(error)
        if refusal is None:
            return session
        session.close()
        self.obstacle = refusal
        return None


def await_welcome(link: HeadLink, timeout_s: float) -> str | None:
    """Wait for the answer to a hello: None if welcome, else the reason. Raises LinkLost."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        received = link.receive(0.2)
        if received is None:
            continue
        if isinstance(received.message, Welcome):
            return None
        if isinstance(received.message, Error):
            return received.message.message
    return f"the tail did not answer within {timeout_s:g} s"
