"""How head and tail come to one split before either has loaded anything.

A head says where it cuts for as long as it lives (`relay.transport.SplitClaim`). A tail that shall find its split takes
that word; where no head has spoken yet, it announces what room it has and waits. A head that shall find its split takes
another head's word, else that of a tail that is loaded already, else chooses from its own room and that of the tails
that wait. So either may start first, and a tail that comes later takes what is in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relay.errors import RelayUnreachable
from relay.messages import FRAME_VERSION
from relay.profile import Profile
from relay.room import Room, least
from relay.transport import Announcement, Relay, TailInfo
from workers.engine.sizes import ModelSizes
from workers.engine.split import check_head_fits, check_tail_fits, choose_split
from workers.errors import NoTail

log = logging.getLogger(__name__)

#: what a head says while it finds no tail at all
NO_TAIL_THERE = "no tail is there (start `shardq tail`)"
#: the options that both sides have to be given alike, by what they make differ
_OPTIONS = {
    "fingerprint": "--model",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "wire_dtype": "--wire-dtype",
    "deterministic": "--deterministic",
    "context": "--max-length",
    "split": "--split",
    "slots": "--slots",
}

#: how often either side looks for the other one's word
LOOK_EVERY_S = 0.5


class Difference(NamedTuple):
    """Something that a tail has otherwise than a head: the tail's ≠ the head's."""

    name: str
    sides: str


def profile_differences(tail: TailInfo, profile: Profile) -> list[Difference]:
    """Where the tail's profile is another one."""
    names = tail.profile.differing(profile)
    return [Difference(name, sides) for name, sides in zip(names, tail.profile.differences(profile), strict=True)]


def misfit(tail: TailInfo, head: str, differences: Sequence[Difference]) -> str | None:
    """Why the tail cannot serve the head, naming both sides, and what to do; None where nothing is in the way."""
    if tail.frames != FRAME_VERSION:
        older = head if tail.frames > FRAME_VERSION else "tail"
        return (
            f"tail {tail.tail} speaks frames of version {tail.frames}, {head} of version {FRAME_VERSION} "
            f"(upgrade the {older})"
        )
    if not differences:
        return None
    sides = "; ".join(difference.sides for difference in differences)
    options = ", ".join(_OPTIONS.get(difference.name, "version of shardq") for difference in differences)
    return f"tail {tail.tail} and {head} differ: {sides} (give both the same {options})"


def split_for_tail(relay: Relay, tail: TailInfo, sizes: ModelSizes, room: Room, stop: threading.Event) -> int | None:
    """The split that heads of the tail's profile use, as soon as there is one; None once `stop` is set.

    Raises SplitInvalid if it does not fit this machine, RelayRefused.
    """
    announced: Announcement | None = None
    try:
        while not stop.is_set():
            try:
                split = relay.split_of(tail.profile)
                if split is not None:
                    check_tail_fits(sizes, split, room)
                    return split
                if announced is None:
                    announced = relay.announce(tail)
                    log.info("tail %s waits for a head of the same model to choose the split", tail.tail)
                announced.pulse()
            except RelayUnreachable as error:
                log.warning("waiting for the split: %s", error)
            stop.wait(LOOK_EVERY_S)
        return None
    finally:
        if announced is not None:
            announced.close()


class HeadsChoice:
    """A head's search for its split."""

    def __init__(
        self,
        relay: Relay,
        profile: Profile,
        sizes: ModelSizes,
        room: Callable[[], Room],
        tell: Callable[[str], object] = lambda obstacle: None,
    ) -> None:
        """`room()` is asked once, when it is needed: it takes a moment. `tell` is told what stands in the way."""
        self._relay = relay
        self._profile = profile
        self._sizes = sizes
        self._measure = room
        self._room: Room | None = None
        self._obstacle = NO_TAIL_THERE
        self._tell = tell

    def wait(self, stop: threading.Event, timeout_s: float | None) -> int | None:
        """The split, as soon as another head or a tail gives reason for one; None once `stop` is set.

        Raises SplitInvalid if the model does not fit, NoTail after `timeout_s`, RelayRefused.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        said: str | None = None
        while not stop.is_set():
            split = self._look()
            if split is not None:
                return split
            if deadline is not None and time.monotonic() >= deadline:
                raise NoTail(f"{self._obstacle}; gave up after {timeout_s:g} s")
            if said != self._obstacle:
                said = self._obstacle
                log.warning("no split yet: %s", self._obstacle)
                self._tell(self._obstacle)
            stop.wait(LOOK_EVERY_S)
        return None

    def _look(self) -> int | None:
        try:
            claimed = self._relay.split_of(self._profile)
            tails = self._relay.tails()
        except RelayUnreachable as error:
            self._obstacle = str(error)
            return None
        misfits = {tail.tail: self._misfit(tail) for tail in tails}
        fitting = [tail for tail in tails if misfits[tail.tail] is None]
        used = claimed or next((tail.split for tail in fitting if tail.split is not None), None)
        if used is not None:
            check_head_fits(self._sizes, used, self._own())
            log.info("cutting at layer %d, as others do", used)
            return used
        rooms = [tail.room for tail in fitting if tail.room is not None]
        if rooms:
            split = choose_split(self._sizes, self._own(), least(rooms))
            log.info("cutting at layer %d, from what this machine and %d tails have", split, len(rooms))
            return split
        self._obstacle = "; ".join(filter(None, misfits.values())) or NO_TAIL_THERE
        return None

    def _misfit(self, tail: TailInfo) -> str | None:
        return misfit(tail, "head", profile_differences(tail, self._profile))

    def _own(self) -> Room:
        if self._room is None:
            self._room = self._measure()
        return self._room
