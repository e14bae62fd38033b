"""What is left once every job has ended and the system is at rest: nothing may have leaked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from relay import keys as wire_keys
from relay.settings import RelaySettings
from tasks import keys
from tasks.heads import live_heads
from tasks.lease import DONE
from tests.chaos import proc
from tests.chaos.field import BOOKKEEPER, MARK, NUM_FRONTS, Field

#: keys that stand for good, with the most members, or bytes, that each may have
_LASTING = {keys.MODELS: 10, keys.HEADS: 10, keys.DATABASE: 1000, keys.HOST: 100}
#: Celery's own: which queue hangs on which exchange, and until when
_BINDINGS = "_kombu.binding"
_MOST_BINDINGS = 64


@dataclass(frozen=True, slots=True)
class Key:
    """A key on a server."""

    kind: str
    #: milliseconds to live; None: for ever
    ttl_ms: int | None
    #: members, entries or bytes
    size: int
    #: of a string
    value: str = ""


@dataclass(frozen=True, slots=True)
class HeadLeft:
    """A head at rest."""

    head: str
    running: int
    live: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remains:
    """Everything that is looked at."""

    heads: tuple[HeadLeft, ...]
    queue: Mapping[str, Key]
    #: results read by the bookkeeper but not settled
    num_pending: int
    wire: Mapping[str, Key]
    #: ids of the tails that live
    tails: frozenset[str]
    #: engine sockets' directories
    sockets: tuple[str, ...]
    #: command line by process id
    processes: Mapping[int, str]


def collect(system: Field) -> Remains:
    """Look at everything now."""
    with (
        redis.Redis.from_url(system.queue.url, protocol=2) as queue,
        redis.Redis.from_url(system.wire.url, protocol=2) as wire,
    ):
        heads = tuple(HeadLeft(info.head_id, info.running, info.live) for info in live_heads(queue))
        pending: Any = queue.xpending(keys.RESULTS, keys.RESULTS_GROUP) if queue.exists(keys.RESULTS) else {}
        return Remains(
            heads=heads,
            queue=_all_keys(queue),
            num_pending=int(pending.get("pending", 0)),
            wire=_all_keys(wire),
            tails=frozenset(_living_tails(wire)),
            sockets=tuple(sorted(path.name for path in system.temporary.glob("shardq-*"))),
            processes=proc.marked(MARK, system.token),
        )


def leaked_slots(heads: Iterable[HeadLeft]) -> list[str]:
    """Heads that still hold jobs."""
    return [
        f"{left.head} has {left.running} jobs in slots and knows {len(left.live)} live ones"
        for left in heads
        if left.running or left.live
    ]


def leaked_queue_keys(found: Mapping[str, Key], heads: Iterable[str], num_pending: int) -> list[str]:
    """Messages, leases and records on the queue server that nobody will take away."""
    problems = [f"{num_pending} records are read and not settled"] if num_pending else []
    presences = {keys.head(head) for head in heads}
    for name, key in sorted(found.items()):
        problem = _queue_problem(name, key, presences)
        if problem:
            problems.append(f"queue server, {name}: {problem}")
    return problems


def _queue_problem(name: str, key: Key, presences: set[str]) -> str | None:
    if name in _LASTING:
        return f"{key.size} members or bytes" if key.size > _LASTING[name] else None
    if name.startswith(_BINDINGS):
        return f"{key.size} bindings" if key.size > _MOST_BINDINGS else None
    if name.endswith(keys.bell("")):
        return f"{key.size} rings of the bell" if key.size > 1 else None
    if name == keys.RESULTS:
        return f"{key.size} records were not taken" if key.size else None
    if name.startswith(keys.job("")) and key.value != DONE:
        return f"the lease of {key.value} still stands"
    if name in presences:
        return None
    if key.kind in ("list", "hash", "zset", "stream"):
        return f"a {key.kind} with {key.size} entries is left"
    return "it never expires" if key.ttl_ms is None else None


def leaked_wire_keys(found: Mapping[str, Key], tails: Iterable[str]) -> list[str]:
    """Streams, leases and counters on the wire server that will not go by themselves."""
    living = set(tails)
    longest_ms = RelaySettings().stream_ttl_s * 1000
    problems = []
    for name, key in sorted(found.items()):
        if key.ttl_ms is None:
            problems.append(f"wire server, {name}: it never expires")
        elif key.kind == "stream" and key.ttl_ms > longest_ms:
            problems.append(f"wire server, {name}: expires in {key.ttl_ms / 1000:.0f} s only")
    for tail in sorted(living):
        epochs = {wire_keys.epoch_of(name) for name in found if name.startswith(f"shardq:link:{tail}:")} - {None}
        if len(epochs) > 1:
            problems.append(f"wire server: streams of {len(epochs)} epochs of tail {tail} are left")
    return problems


def leaked_sockets(sockets: Iterable[str], num_heads: int) -> list[str]:
    """Directories of engines that are gone."""
    found = list(sockets)
    return [f"{len(found)} engine sockets for {num_heads} heads"] if len(found) > num_heads else []


def leaked_processes(processes: Mapping[int, str], workers: Iterable[str]) -> list[str]:
    """Processes that no living worker needs, or that are missing."""
    names = list(workers)
    num_heads = sum(name.startswith("head") for name in names)
    wanted = {
        "bookkeeper": names.count(BOOKKEEPER),
        "tail": sum(name.startswith("tail") for name in names),
        "head": num_heads,
        "front": NUM_FRONTS * num_heads,
    }
    counts = dict.fromkeys(wanted, 0)
    strangers = []
    for pid, command in sorted(processes.items()):
        role = role_of(command)
        if role is None:
            strangers.append(f"process {pid} is left: {command[:120]}")
        else:
            counts[role] += 1
    return strangers + [
        f"{counts[role]} {role} processes, {number} wanted" for role, number in wanted.items() if counts[role] != number
    ]


def role_of(command: str) -> str | None:
    """What a command line runs; None for nothing of ours."""
    if "workers.head.front" in command:
        return "front"
    words = command.split()
    if "cli.main" not in words:
        return None
    name = words[words.index("cli.main") + 1] if len(words) > words.index("cli.main") + 1 else ""
    return name if name in ("bookkeeper", "tail", "head") else None


def _living_tails(wire: redis.Redis) -> list[str]:
    names = [_text(key) for key in wire.scan_iter(match=wire_keys.TAILS_PATTERN, count=1000)]
    presences = [name for name in names if wire_keys.is_presence(name)]
    return [json.loads(value)["tail"] for name in presences if (value := wire.get(name))]


_SIZES = {"list": "llen", "hash": "hlen", "set": "scard", "zset": "zcard", "stream": "xlen", "string": "strlen"}


def _all_keys(client: redis.Redis) -> dict[str, Key]:
    found = {}
    for raw in client.scan_iter(count=1000):
        name = _text(raw)
        kind, ttl_ms = _text(client.type(raw)), int(client.pttl(raw))
        if kind == "none" or ttl_ms == -2:
            continue  # it expired just now
        size = int(getattr(client, _SIZES[kind])(raw))
        value = _text(client.get(raw) or b"") if kind == "string" else ""
        found[name] = Key(kind, None if ttl_ms == -1 else ttl_ms, size, value)
    return found


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
