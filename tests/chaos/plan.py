"""What is done to the system, drawn from a seed before anything runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a fault does; docs/chaos.md says it in words."""

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

#: kinds that strike a head, a tail or a server: only once everything works, for a pair must be left over
NEED_ALL = frozenset(
    {
        Kind.KILL_HEAD,
        Kind.KILL_FRONT,
        Kind.KILL_TAIL,
        Kind.FREEZE_HEAD,
        Kind.FREEZE_TAIL,
        Kind.DRAIN_HEAD,
        Kind.DRAIN_TAIL,
        Kind.SWAP_TAIL,
        Kind.RESTART_QUEUE,
        Kind.RESTART_WIRE,
        Kind.REDELIVER,
        Kind.LOSE_TAKEN,
    }
)
#: those after which a process needs long to start: others come between them
LONG = (Kind.KILL_HEAD, Kind.KILL_TAIL, Kind.DRAIN_HEAD, Kind.DRAIN_TAIL, Kind.SWAP_TAIL, Kind.LOSE_TAKEN)
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
    """`count` faults: each kind comes once before any comes again, the long ones every second time only.

    The order is another one each time.
    """
    source, num_decks = random.Random(seed), 0
    deck: list[Kind] = []
    turns: dict[Kind, int] = {}
    faults = []
    for number in range(1, count + 1):
        if not deck:
            deck = _shuffled(source, kinds if num_decks % 2 == 0 or set(kinds) <= set(LONG) else _short(kinds))
            num_decks += 1
        kind = deck.pop()
        turns[kind] = turns.get(kind, source.randrange(2)) + 1
        length_s = source.uniform(*LENGTHS_S[kind]) if kind in LENGTHS_S else 0.0
        pause_s = source.uniform(0.0, MAX_PAUSE_S)
        faults.append(Fault(number, kind, source.random(), length_s, pause_s, turns[kind] % 2 == 1))
    return faults


def _short(kinds: Sequence[Kind]) -> list[Kind]:
    return [kind for kind in kinds if kind not in LONG]


def _shuffled(source: random.Random, kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds in a random order, the long ones evenly spread, those that can strike while one starts after each."""
    long = source.sample([kind for kind in kinds if kind in LONG], sum(kind in LONG for kind in kinds))
    short = source.sample(_short(kinds), len(kinds) - len(long))
    parts = max(len(long), 1)
    mixed: list[Kind] = []
    for part in range(parts):
        between = short[part * len(short) // parts : (part + 1) * len(short) // parts]
        mixed += sorted(between, key=lambda kind: kind not in NEED_ALL) + long[part : part + 1]
    return mixed
