"""What is done to the system, drawn from a seed before anything runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a fault does."""

    KILL_HEAD = "kill-head"
    KILL_FRONT = "kill-front"
    KILL_TAIL = "kill-tail"
    KILL_BOOKKEEPER = "kill-bookkeeper"
    KILL_SUBMIT = "kill-submit"
    FREEZE_HEAD = "freeze-head"
    FREEZE_TAIL = "freeze-tail"
    FREEZE_BOOKKEEPER = "freeze-bookkeeper"
    DRAIN_HEAD = "drain-head"
    DRAIN_TAIL = "drain-tail"
    SWAP_TAIL = "swap-tail"
    RESET = "reset"
    HALF_OPEN = "half-open"
    STALL = "stall"
    UNREACHABLE = "unreachable"
    SLOW_LINK = "slow-link"
    RESTART_QUEUE = "restart-queue"
    RESTART_WIRE = "restart-wire"
    DISK_FULL = "disk-full"
    DUPLICATE = "duplicate"
    REDELIVER = "redeliver"
    LOSE_READY = "lose-ready"
    LOSE_TAKEN = "lose-taken"


#: what each kind does, for the report and docs/chaos.md
MEANINGS: dict[Kind, str] = {
    Kind.KILL_HEAD: "kill -9 of a head's engine; every second time of its fronts with it",
    Kind.KILL_FRONT: "kill -9 of one front",
    Kind.KILL_TAIL: "kill -9 of a tail that has a head",
    Kind.KILL_BOOKKEEPER: "kill -9 of the bookkeeper",
    Kind.KILL_SUBMIT: "kill -9 of `shardq submit` in the middle; it is run again with the same --name",
    Kind.FREEZE_HEAD: "SIGSTOP of a head's engine and fronts, SIGCONT later",
    Kind.FREEZE_TAIL: "SIGSTOP of a tail that has a head, SIGCONT later",
    Kind.FREEZE_BOOKKEEPER: "SIGSTOP of the bookkeeper, SIGCONT later",
    Kind.DRAIN_HEAD: "SIGTERM of a head: it drains, ends and is started again",
    Kind.DRAIN_TAIL: "SIGTERM of a tail that has a head: it ends and is started again",
    Kind.SWAP_TAIL: "the end of a tail that stays away until another one has taken over",
    Kind.RESET: "every connection of one link is reset",
    Kind.HALF_OPEN: "every connection of one link goes silent for good; new ones work a few seconds later",
    Kind.STALL: "nothing arrives over one link for some seconds; nothing is lost",
    Kind.UNREACHABLE: "one link is down: its connections are reset, new ones refused",
    Kind.SLOW_LINK: "300 ms more and 32 kB/s on one link for some seconds",
    Kind.RESTART_QUEUE: "the queue server is away for some seconds: ended in order, every second time by kill -9",
    Kind.RESTART_WIRE: "the same with the wire server, which forgets everything",
    Kind.DISK_FULL: "the bookkeeper can write no file (RLIMIT_FSIZE 0 through prlimit)",
    Kind.DUPLICATE: "three copies of a message that a head works on are queued",
    Kind.REDELIVER: "all messages that a living head has taken are queued again, as a blip does",
    Kind.LOSE_READY: "a message vanishes from the ready list",
    Kind.LOSE_TAKEN: "a head's unacknowledged messages vanish, and the head is killed",
}

#: shortest and longest duration in seconds, of kinds that have one
LENGTHS_S: dict[Kind, tuple[float, float]] = {
    Kind.FREEZE_HEAD: (2.0, 8.0),
    Kind.FREEZE_TAIL: (2.0, 8.0),
    Kind.FREEZE_BOOKKEEPER: (2.0, 8.0),
    Kind.HALF_OPEN: (1.0, 4.0),
    Kind.STALL: (2.0, 6.0),
    Kind.UNREACHABLE: (1.0, 5.0),
    Kind.SLOW_LINK: (3.0, 6.0),
    Kind.RESTART_QUEUE: (0.2, 3.0),
    Kind.RESTART_WIRE: (0.2, 3.0),
    Kind.DISK_FULL: (2.0, 6.0),
}

#: kinds that destroy messages: the reconciler finds their jobs
LOSSES = frozenset({Kind.LOSE_READY, Kind.LOSE_TAKEN})
#: longest pause before a fault, in seconds
MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. What it hits is chosen when it strikes, among what then is there."""

    number: int
    kind: Kind
    #: picks the victim: 0 the first, almost 1 the last
    victim: float
    #: 0 for a fault that is over at once
    length_s: float
    #: seconds of peace before it
    pause_s: float
    #: the harder one of a kind's two ways
    hard: bool


def draw(seed: int, count: int, kinds: Sequence[Kind] = tuple(Kind)) -> list[Fault]:
    """`count` faults: each kind comes once before any comes again, in an order of its own each time."""
    source = random.Random(seed)
    deck: list[Kind] = []
    turns: dict[Kind, int] = {}
    faults = []
    for number in range(1, count + 1):
        if not deck:
            deck = source.sample(list(kinds), len(kinds))
        kind = deck.pop()
        turns[kind] = turns.get(kind, source.randrange(2)) + 1
        length_s = source.uniform(*LENGTHS_S[kind]) if kind in LENGTHS_S else 0.0
        pause_s = source.uniform(0.0, MAX_PAUSE_S)
        faults.append(Fault(number, kind, source.random(), length_s, pause_s, turns[kind] % 2 == 1))
    return faults
