"""How fast this machine's own way to the wire server is: what `shardq doctor --link` measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from relay import keys
from relay.connections import Connections

#: bytes of one entry; incompressible, as hidden states are
CHUNK_BYTES = 256 << 10
#: seconds and bytes after which a direction was measured for long enough
ENOUGH_S = 1.0
MOST_BYTES = 16 << 20
#: seconds after which the server drops what a probe left
KEPT_S = 30
#: round trips measured
PINGS = 5


@dataclass(frozen=True, slots=True)
class Leg:
    """One machine's way to the server and back."""

    #: milliseconds, the median of a few
    rtt_ms: float
    #: Mbit/s to the server and from it, of one connection
    mbit_per_s_up: float
    mbit_per_s_down: float


def measure(connections: Connections) -> Leg:
    """Send a few megabytes to a key of the probe's own and read them again; takes about two seconds.

    The key holds one entry at a time and expires. Raises a RelayError, RelayRefused for an account without the right.
    """
    client, key = connections.client, keys.new_probe()
    with connections.translated():
        rtt_s = _rtt_s(client)
        body = os.urandom(CHUNK_BYTES)

        def write() -> None:
            client.xadd(key, {"d": body}, maxlen=1, approximate=False)

        write()
        client.expire(key, KEPT_S)
        up = _mbit_per_s(write, rtt_s)
        down = _mbit_per_s(lambda: client.xread({key: "0"}, count=1), rtt_s)
    return Leg(1000 * rtt_s, up, down)


def _rtt_s(client: redis.Redis) -> float:
    times = []
    for _ in range(PINGS + 1):  # the first one connects
        before = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - before)
    return sorted(times[1:])[PINGS // 2]


def _mbit_per_s(move: Callable[[], object], rtt_s: float) -> float:
    """Of entries moved one after another: the way of an empty one does not count."""
    started, moved, busy_s = time.perf_counter(), 0, 0.0
    while moved < MOST_BYTES and time.perf_counter() - started < ENOUGH_S:
        before = time.perf_counter()
        move()
        busy_s += max(1e-6, time.perf_counter() - before - rtt_s)
        moved += CHUNK_BYTES
    return 8e-6 * moved / busy_s
