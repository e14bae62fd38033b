"""`shardq doctor --link`: this machine's way to both servers, and what each pair's link lets expect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import redis

from cli.doctor.findings import Finding, failed, ok, skipped, warning
from cli.doctor.roles import Place, Role
from relay.errors import RelayError, RelayRefused
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.expectation import FEWEST_ROUNDS, Expectation, expected
from tasks.heads import HeadInfo, live_heads, told_by
from tasks.settings import TaskSettings
from workers.settings import HeadSettings

#: dollars for a GB that leaves the host; what AWS EC2 takes for the first 10 TB a month
COST_PER_GB = 0.09
#: round trips measured
PINGS = 5

#: what helps, by what limits
_CURES = {
    "round trip": "more lanes (--max-lanes) or slots (--slots) hide it; a host nearer to both machines shortens it",
    "bandwidth": "a narrower --wire-dtype, --wire-compress or a faster host",
    "head": "an earlier --split, or a faster machine for the head",
    "tail": "a later --split, or a faster machine for the tail",
}


def check_link(place: Place, cost_per_gb: float) -> Iterator[Finding]:
    """This machine's legs, then every pair that is alive and that its account may see."""
    yield from _wire_leg()
    if place.role == Role.TAIL:
        yield skipped("queue leg", "a tail needs no queue server: ask its head, or the host, for the whole link")
        return
    try:
        with closing(connect(TaskSettings())) as client, translated():
            client.ping()
            times = []
            for _ in range(PINGS):
                before = time.perf_counter()
                client.ping()
                times.append(time.perf_counter() - before)
            yield ok("queue leg", f"round trip {1000 * sorted(times)[PINGS // 2]:.1f} ms")
            heads = _seen(place, client)
    except (TaskError, RelayError) as error:
        yield failed("queue leg", str(error))
        return
    pairs = [head for head in heads if not head.whole]
    if not pairs:
        yield warning("link", "no head that needs a tail is alive: the whole link is measured by a pair at work")
    for head in pairs:
        yield from _pair(head, cost_per_gb)


def _seen(place: Place, client: redis.Redis) -> list[HeadInfo]:
    """The heads that this account sees: a head's own, else all."""
    if place.role == Role.HEAD and place.queue_account is not None:
        own = told_by(client, HeadSettings(model="").head_id)
        return [] if own is None else [own]
    return [] if place.role == Role.FLOWER else live_heads(client)


def _wire_leg() -> Iterator[Finding]:
    try:
        with closing(RedisRelay(RelaySettings().url, allow_insecure=TaskSettings().allow_insecure)) as relay:
            rtt_ms = 1000 * relay.ping()
            yield _bandwidth(relay, rtt_ms)
    except RelayError as error:
        yield failed("wire leg", str(error))


def _bandwidth(relay: RedisRelay, rtt_ms: float) -> Finding:
    try:
        leg = relay.probe()
    except RelayRefused:
        text = "this account may not measure bandwidth: use the variables of a head or a tail"
        return warning("wire leg", f"round trip {rtt_ms:.1f} ms; {text}")
    speeds = f"{leg.mbit_per_s_up:,.0f} Mbit/s up, {leg.mbit_per_s_down:,.0f} down"
    return ok("wire leg", f"round trip {leg.rtt_ms:.1f} ms, {speeds}, on one connection")


def _pair(head: HeadInfo, cost_per_gb: float) -> Iterator[Finding]:
    figures = head.figures
    if figures is None or not head.consuming:
        yield warning("link", f"{head.head_id} has no tail now")
        return
    found = expected(figures, cost_per_gb)
    if found is None:
        yield warning("link", f"{head.head_id} made fewer than {FEWEST_ROUNDS} rounds: submit a batch, then ask again")
        return
    rtt = "unknown" if figures.rtt_ms is None else f"{figures.rtt_ms:.1f} ms"
    speed = "unknown" if figures.mbit_per_s_up is None else f"{figures.mbit_per_s_up:,.0f} Mbit/s"
    ways = f"round trip {rtt}, bandwidth up {speed}, a round takes {found.round_ms:.1f} ms"
    yield ok("link", f"{head.head_id} to {figures.tail_id}: {ways}")
    yield ok("expect", _expectation(head, found))
    yield ok("limit", f"{head.head_id}: {found.limit}; {_CURES[found.limit]}")


def _expectation(head: HeadInfo, found: Expectation) -> str:
    return (
        f"{head.head_id}: about {found.tokens_per_s:,.1f} tokens/s, {found.gb_per_hour:,.2f} GB and "
        f"${found.cost_per_hour:,.2f} an hour, ${found.cost_per_million_tokens:,.2f} for a million tokens"
    )
