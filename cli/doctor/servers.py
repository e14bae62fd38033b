"""Both Redis servers, and who lives on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import redis

from cli.database import opened
from cli.doctor.findings import Finding, failed, ok, warning
from cli.doctor.kept import check_kept
from relay.errors import RelayError
from relay.guard import redact
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from storage.errors import StorageError
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import live_heads, registered_models
from tasks.served import unheard_models
from tasks.settings import TaskSettings

#: round trips measured
PINGS = 5


def check_queue() -> Iterator[Finding]:
    """The queue server, and what it knows of bookkeeper and heads."""
    settings = TaskSettings()
    try:
        client = connect(settings)
        with translated():
            yield ok("queue", f"{redact(settings.broker_url)}, round trip {_round_trip_ms(client):.1f} ms")
            yield from _queue_configuration(client)
            yield from _bookkeeper(client)
            yield from check_kept(client)
            yield from _heads(client)
            yield from _waited_for(client)
    except (TaskError, RelayError) as error:
        yield failed("queue", f"{error} (SHARDQ_BROKER_URL; is Redis running there?)")


def _round_trip_ms(client: redis.Redis) -> float:
    client.ping()
    times = []
    for _ in range(PINGS):
        start = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[PINGS // 2]


def _queue_configuration(client: redis.Redis) -> Iterator[Finding]:
    try:
        # CONFIG GET would say the same, but no account may use it
        policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
        persistent = client.info("persistence").get("aof_enabled", 1)
    except redis.ResponseError:
        return  # an account without the right to look, or a hosted server
    if policy != "noeviction":
        yield failed("queue", f"maxmemory-policy is {policy}: jobs would be dropped; set it to noeviction")
    if not persistent:
        yield warning("queue", "no append-only file: a restart of this server loses the queue until it is fed again")


def _bookkeeper(client: redis.Redis) -> Iterator[Finding]:
    if client.exists(keys.BOOKKEEPER):
        yield ok("bookkeeper", "alive")
    else:
        yield warning("bookkeeper", "none is alive: start one with `shardq bookkeeper`")


def _heads(client: redis.Redis) -> Iterator[Finding]:
    heads = live_heads(client)
    models = ", ".join(registered_models(client)) or "none"
    if not heads:
        yield warning("heads", f"none is alive (models registered: {models}): start one with `shardq head`")
    for head in heads:
        alone = ", the whole model in one process" if head.whole else ""
        text = f"{head.head_id} serves {head.model} with {head.slots} slots{alone}"
        if head.consuming:
            yield ok("heads", text)
        else:
            yield warning("heads", f"{text}, but has no tail and takes no jobs: start one with `shardq tail`")


def _waited_for(client: redis.Redis) -> Iterator[Finding]:
    with suppress(StorageError), opened() as database:  # which the check of the database names
        for name in sorted(unheard_models(client, database)):
            yield warning("heads", f"jobs wait for the first that serves {name!r} (`shardq head --name {name}`)")


def check_wire() -> Iterator[Finding]:
    """The wire server and the tails on it."""
    url = RelaySettings().url
    try:
        relay = RedisRelay(url, allow_insecure=TaskSettings().allow_insecure)
        rtt_ms, tails = 1000 * relay.ping(), relay.tails()
        relay.close()
    except RelayError as error:
        if _needs_no_tail():
            yield ok("wire", "not needed: every head that is alive has the whole model")
        else:
            yield failed("wire", f"{error} (SHARDQ_RELAY_URL; is Redis running there?)")
        return
    yield ok("wire", f"{redact(url)}, round trip {rtt_ms:.1f} ms")
    if not tails and not _needs_no_tail():
        yield warning("tails", "none is alive: start one with `shardq tail`")
    for tail in tails:
        layers = "no layers before a head has chosen the split" if tail.split is None else f"layers from {tail.split}"
        yield ok("tails", f"{tail.tail}, {layers}, up to {tail.slots} slots")


def _needs_no_tail() -> bool:
    """Whether heads are alive, and all of them are whole."""
    try:
        with translated():
            heads = live_heads(connect(TaskSettings()))
    except TaskError:
        return False
    return bool(heads) and all(head.whole for head in heads)
