"""How each kind of fault is done, from outside: signals, links, servers, keys. No product code takes part."""

from __future__ import annotations

import json
import resource
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import redis

from benchmarks.link_simulator import LinkShape, LinkSimulator
from relay import keys as wire_keys
from tasks import keys, queues
from tasks.heads import restore_unacked
from tests.chaos.field import BOOKKEEPER, Field, signal_all, signal_process
from tests.chaos.plan import Fault, Kind
from tests.chaos.submissions import Submissions

T = TypeVar("T")

#: what SLOW_LINK adds to a link's delay one way, and the rate it leaves
SLOW_DELAY_S = 0.15
SLOW_BYTES_PER_S = 32_000
#: copies of a message that DUPLICATE queues
NUM_COPIES = 3
#: seconds to wait for something to hit, as a message in a ready list
HUNT_S = 10.0


@dataclass(frozen=True, slots=True)
class Strike:
    """What a fault did, and when (Unix times)."""

    fault: Fault
    hit: str
    began: float
    ended: float
    #: jobs that had not ended when it struck
    num_open: int = 0
    #: what came after this is none of its doing, even before the next fault
    until: float = float("inf")


class Striker:
    """Does faults to a system. `strike` returns when the fault is over."""

    def __init__(self, field: Field, submissions: Submissions, booting: Callable[[], frozenset[str]]) -> None:
        """`booting()`: processes that are just starting; their links are spared."""
        self._field = field
        self._booting = booting
        self._submissions = submissions
        self._queue = redis.Redis.from_url(field.queue.url, protocol=2)
        self._wire = redis.Redis.from_url(field.wire.url, protocol=2)
        self._ways: dict[Kind, Callable[[Fault], str]] = {
            Kind.KILL_HEAD: self._kill_head,
            Kind.KILL_FRONT: self._kill_front,
            Kind.KILL_TAIL: lambda fault: self._end_process(self._busy_tail(fault), signal.SIGKILL),
            Kind.KILL_BOOKKEEPER: lambda fault: self._end_process(BOOKKEEPER, signal.SIGKILL),
            Kind.KILL_SUBMIT: lambda fault: self._submissions.kill_next(),
            Kind.FREEZE_HEAD: lambda fault: self._freeze(self._head(fault), fault),
            Kind.FREEZE_TAIL: lambda fault: self._freeze(self._busy_tail(fault), fault),
            Kind.FREEZE_BOOKKEEPER: lambda fault: self._freeze(BOOKKEEPER, fault),
            Kind.DRAIN_HEAD: lambda fault: self._end_process(self._head(fault), signal.SIGTERM),
            Kind.DRAIN_TAIL: lambda fault: self._end_process(self._busy_tail(fault), signal.SIGTERM),
            Kind.SWAP_TAIL: self._swap_tail,
            Kind.RESET: lambda fault: self._on_link(fault, lambda link: link.cut()),
            Kind.HALF_OPEN: lambda fault: self._on_link(fault, lambda link: link.swallow(fault.length_s)),
            Kind.STALL: lambda fault: self._on_link(fault, lambda link: link.stall(fault.length_s)),
            Kind.UNREACHABLE: self._unreachable,
            Kind.SLOW_LINK: self._slow_link,
            Kind.RESTART_QUEUE: self._restart_queue,
            Kind.RESTART_WIRE: self._restart_wire,
            Kind.DISK_FULL: self._disk_full,
            Kind.DUPLICATE: self._duplicate,
            Kind.REDELIVER: self._redeliver,
            Kind.LOSE_READY: self._lose_ready,
            Kind.LOSE_TAKEN: self._lose_taken,
        }

    def strike(self, fault: Fault) -> Strike:
        """Do it, to its end."""
        began = time.time()
        hit = self._ways[fault.kind](fault)
        return Strike(fault, hit, began, time.time())

    # -- processes --------------------------------------------------------------------------------------------

    def _head(self, fault: Fault) -> str:
        return pick(self._field.heads_names, fault)

    def _busy_tail(self, fault: Fault) -> str:
        """A tail that a head holds; any if none is held."""
        names = [_text(key) for key in self._wire.scan_iter(match=wire_keys.TAILS_PATTERN, count=1000)]
        leased = [name for name in names if not wire_keys.is_presence(name)]
        tails = {wire_keys.tail_name(name.split(":")[2]) for name in leased}
        up = [name for name in self._field.tails_names if self._field.living(name) is not None]
        return pick([name for name in up if name in tails] or up, fault)

    def _end_process(self, name: str, number: signal.Signals) -> str:
        self._field.end(name, number)
        return name

    def _kill_head(self, fault: Fault) -> str:
        head = self._head(fault)
        fronts = self._field.fronts(head) if fault.hard else []
        self._field.end(head, signal.SIGKILL)
        signal_all(fronts, signal.SIGKILL)
        return f"{head} and its fronts" if fault.hard else head

    def _kill_front(self, fault: Fault) -> str:
        head = self._head(fault)
        pid = pick(self._field.fronts(head), fault)
        signal_process(pid, signal.SIGKILL)
        return f"{head}, front {pid}"

    def _freeze(self, name: str, fault: Fault) -> str:
        pid = self._field.living(name)
        pids = ([pid] if pid is not None else []) + (self._field.fronts(name) if name.startswith("head") else [])
        signal_all(pids, signal.SIGSTOP)
        try:
            time.sleep(fault.length_s)
        finally:
            signal_all(pids, signal.SIGCONT)
        return f"{name} for {fault.length_s:.1f} s"

    def _swap_tail(self, fault: Fault) -> str:
        tail = self._busy_tail(fault)
        self._field.hold(tail)
        self._field.end(tail, signal.SIGKILL if fault.hard else signal.SIGTERM)
        return f"{tail} by {'kill -9' if fault.hard else 'SIGTERM'}"

    def _disk_full(self, fault: Fault) -> str:
        pid = self._field.living(BOOKKEEPER)
        if pid is None:
            raise RuntimeError("the bookkeeper is down")
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            time.sleep(fault.length_s)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        return f"for {fault.length_s:.1f} s"

    # -- links and servers ------------------------------------------------------------------------------------

    def _link(self, fault: Fault) -> tuple[str, LinkSimulator]:
        booting = self._booting()
        child, role = pick(sorted(link for link in self._field.links if link[0] not in booting), fault)
        return f"{child} to {role}", self._field.links[child, role]

    def _on_link(self, fault: Fault, action: Callable[[LinkSimulator], None]) -> str:
        name, link = self._link(fault)
        action(link)
        time.sleep(fault.length_s)
        return f"{name} for {fault.length_s:.1f} s" if fault.length_s else name

    def _unreachable(self, fault: Fault) -> str:
        name, link = self._link(fault)
        link.refusing = True
        link.cut()
        try:
            time.sleep(fault.length_s)
        finally:
            link.refusing = False
        return f"{name} for {fault.length_s:.1f} s"

    def _slow_link(self, fault: Fault) -> str:
        name, link = self._link(fault)
        usual = LinkShape() if name.startswith(BOOKKEEPER) else self._field.link_shape
        rates = {"up_bytes_per_s": SLOW_BYTES_PER_S, "down_bytes_per_s": SLOW_BYTES_PER_S}
        link.reshape(replace(usual, delay_s=usual.delay_s + SLOW_DELAY_S, **rates))
        try:
            time.sleep(fault.length_s)
        finally:
            link.reshape(usual)
        return f"{name} for {fault.length_s:.1f} s"

    def _restart_queue(self, fault: Fault) -> str:
        self._field.restart(self._field.queue, fault.length_s, kill=fault.hard)
        return _how(fault)

    def _restart_wire(self, fault: Fault) -> str:
        self._field.restart(self._field.wire, fault.length_s, kill=fault.hard)
        return _how(fault)

    # -- messages ---------------------------------------------------------------------------------------------

    def _duplicate(self, fault: Fault) -> str:
        taken = self._taken()
        if not taken:
            return "nothing was there to hit"
        head, tag = pick(taken, fault)
        value: Any = self._queue.hget(keys.unacked(head), tag)
        if value is None:
            return "nothing was there to hit"
        message, _, routing_key = json.loads(value)
        priority = int(message["properties"].get("priority") or 0)
        for _ in range(NUM_COPIES):
            # a message of its own, as the reconciler's would be
            message["properties"]["delivery_tag"] = str(uuid.uuid4())
            self._queue.rpush(keys.ready_at(routing_key, priority), json.dumps(message))
        return queues.task_id(message)

    def _redeliver(self, fault: Fault) -> str:
        head = self._head(fault)
        return f"{restore_unacked(self._queue, head)} messages of {head}"

    def _lose_ready(self, fault: Fault) -> str:
        """Take a message where a head would take it, as one that dies with it in its hands.

        The fronts stand still meanwhile, or they would be quicker.
        """
        fronts = [pid for head in self._field.heads_names for pid in self._field.fronts(head)]
        signal_all(fronts, signal.SIGSTOP)
        try:
            return self._hunt()
        finally:
            signal_all(fronts, signal.SIGCONT)

    def _hunt(self) -> str:
        self._submissions.hurry()
        names = keys.ready(self._field.name)
        deadline = time.monotonic() + HUNT_S
        while time.monotonic() < deadline:
            for name in names:
                message: Any = self._queue.rpop(name)
                if message is not None:
                    return queues.task_id(json.loads(message))
            time.sleep(0.01)
        return "nothing was there to hit"

    def _lose_taken(self, fault: Fault) -> str:
        head = self._head(fault)
        fronts = self._field.fronts(head)
        pid = self._field.living(head)
        signal_all([*fronts, *([pid] if pid is not None else [])], signal.SIGSTOP)
        num_lost = int(self._queue.hlen(keys.unacked(head)))
        self._queue.delete(keys.unacked(head), keys.unacked_index(head))
        signal_all(fronts, signal.SIGKILL)
        self._field.end(head, signal.SIGKILL)
        return f"{head} and {num_lost} messages"

    def _taken(self) -> list[tuple[str, bytes | str]]:
        """(head, delivery tag) of every message that a head has taken."""
        return [
            (head, tag) for head in self._field.heads_names for tag in sorted(self._queue.hkeys(keys.unacked(head)))
        ]


def pick(candidates: Sequence[T], fault: Fault) -> T:
    """The fault's victim among these."""
    return candidates[int(fault.victim * len(candidates))]


def _how(fault: Fault) -> str:
    return f"{'kill -9' if fault.hard else 'SIGTERM'}, away {fault.length_s:.1f} s"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
