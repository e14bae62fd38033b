"""Both Redis servers, and who lives on them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import redis

from cli.database import opened
from cli.doctor.findings import Finding, failed, ok, warning
from cli.doctor.kept import check_kept
from cli.reasons import idle_heads, unread_tasks
from relay.errors import RelayError
from relay.guard import redact
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import TailInfo
from storage.errors import StorageError
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import HeadInfo, live_heads, registered_models
from tasks.queues import num_waiting_by_version
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
        elif head.obstacle is not None:
            yield warning("heads", f"{text}, but takes no jobs: {head.obstacle}")
        else:
            yield warning("heads", f"{text}, but has no tail and takes no jobs: start one with `shardq tail`")
    for model in registered_models(client):
        for waiting in unread_tasks(heads, model, num_waiting_by_version(client, model)):
            yield warning("heads", waiting)


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
    heads = _living_heads()
    for tail in tails:
        layers = "no layers before a head has chosen the split" if tail.split is None else f"layers from {tail.split}"
        text = f"{tail.tail}, {layers}, up to {tail.slots} slots"
        misfit = _misfit(tail, heads)
        yield ok("tails", text) if misfit is None else warning("tails", f"{text}, but {misfit}")


def _misfit(tail: TailInfo, heads: Sequence[HeadInfo]) -> str | None:
    """What keeps idle heads from this tail, which serves no other; None if nothing is known to."""
    if any(head.consuming and head.figures is not None and head.figures.tail_id == tail.tail for head in heads):
        return None
    return "; ".join(said for said in idle_heads(heads, [tail]) if tail.tail in said) or None


def _living_heads() -> list[HeadInfo]:
    try:
        with translated():
            return live_heads(connect(TaskSettings()))
    except TaskError:
        return []


def _needs_no_tail() -> bool:
    """Whether heads are alive, and all of them are whole."""
    heads = _living_heads()
    return bool(heads) and all(head.whole for head in heads)
