"""The queue server: bookkeeper, heads and what waits for them, as far as the account may see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import redis

from cli.database import opened
from cli.doctor.findings import Finding, failed, ok, skipped, warning
from cli.doctor.kept import check_kept
from cli.doctor.roles import Place, Role
from cli.doctor.security import check_connection
from cli.output import counted
from cli.reasons import unread_tasks
from relay.guard import redact
from storage.errors import StorageError
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import HeadInfo, host_version, live_heads, registered_models, told_by, wrong_database
from tasks.queues import num_waiting_by_version
from tasks.served import unheard_models
from tasks.settings import TaskSettings
from workers.settings import HeadSettings

#: round trips measured
PINGS = 5
#: of a head that does not say why it takes no jobs
_NO_TAIL = "has no tail and takes no jobs: start one with `shardq tail`"


def check_queue(place: Place, model: str | None) -> Iterator[Finding]:
    """The queue server, and what it knows of bookkeeper and heads."""
    if place.role == Role.TAIL:
        yield skipped("queue", "a tail needs none, and its account may see neither heads nor bookkeeper: ask the host")
        return
    settings = TaskSettings()
    try:
        with closing(connect(settings)) as client, translated():
            yield ok("queue", f"{redact(settings.broker_url)}, round trip {_round_trip_ms(client):.1f} ms")
            yield from check_connection("queue", settings.broker_url, settings.tls_ca)
            if place.queue_account is None and (wrong := wrong_database(client)):
                yield failed("queue", wrong)
            else:
                yield from _on_the_queue(place, client, model)
    except TaskError as error:
        yield failed("queue", str(error))


def _on_the_queue(place: Place, client: redis.Redis, model: str | None) -> Iterator[Finding]:
    if place.role == Role.FLOWER:
        names: Any = client.hkeys(keys.MODELS)
        served = sorted(name.decode() for name in names)
        yield ok("models", f"registered: {', '.join(served) or 'none'}")
        yield skipped("heads", "Flower's account may see neither heads nor bookkeeper: ask the host")
    elif place.role == Role.HEAD:
        yield from _own_head(place, client, HeadSettings(model=model or ""))
        if (told := host_version(client)) is not None:
            yield ok("host", f"its bookkeeper is of shardq {told}")
        if place.queue_account is None:
            yield from _bookkeeper(place, client)
        else:
            yield skipped("bookkeeper", "a head's account may see neither it nor other heads: ask the host")
    else:
        yield from _queue_configuration(client)
        yield from _bookkeeper(place, client)
        yield from check_kept(client)
        yield from _heads(place, client)
        yield from _waited_for(client)


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


def _bookkeeper(place: Place, client: redis.Redis) -> Iterator[Finding]:
    if client.exists(keys.BOOKKEEPER):
        # a client's account may not ask for the version
        told = host_version(client) if place.queue_account is None or place.role == Role.HOST else None
        yield ok("bookkeeper", f"alive, shardq {told}" if told else "alive")
    else:
        text = "none is alive, nothing is fed or recorded: start one with `shardq bookkeeper`"
        yield place.lacks("bookkeeper", text, Role.HOST, Role.CLIENT)


def _heads(place: Place, client: redis.Redis) -> Iterator[Finding]:
    heads = live_heads(client)
    models = ", ".join(registered_models(client)) or "none"
    if not heads:
        text = f"none is alive (models registered: {models}): start one with `shardq head`"
        yield place.lacks("heads", text, Role.CLIENT)
    # one that takes jobs is enough for what is submitted to be done
    needed_by = () if any(head.consuming for head in heads) else (Role.CLIENT,)
    for head in heads:
        yield _head(place, head, *needed_by)
    for model in registered_models(client):
        for waiting in unread_tasks(heads, model, num_waiting_by_version(client, model)):
            yield warning("heads", waiting)


def _waited_for(client: redis.Redis) -> Iterator[Finding]:
    with suppress(StorageError), opened() as database:  # which the check of the database names
        for name in sorted(unheard_models(client, database)):
            yield warning("heads", f"jobs wait for the first that serves {name!r} (`shardq head --name {name}`)")


def _head(place: Place, head: HeadInfo, *needed_by: Role) -> Finding:
    alone = ", the whole model in one process" if head.whole else ""
    release = f", shardq {head.version}" if head.version else ""
    text = f"{head.head_id} serves {head.model} with {counted(head.slots, 'slot')}{alone}{release}"
    if head.consuming:
        return ok("heads", text)
    obstacle = f"takes no jobs: {head.obstacle}" if head.obstacle else _NO_TAIL
    return place.lacks("heads", f"{text}, but {obstacle}", *needed_by)


def _own_head(place: Place, client: redis.Redis, settings: HeadSettings) -> Iterator[Finding]:
    """The head that runs here, and whether the account may be it."""
    head_id, account = settings.head_id, place.queue_account
    try:
        head = told_by(client, head_id)
    except redis.exceptions.NoPermissionError:
        yield failed("heads", f"the account {account} may not be head {head_id!r}: see SHARDQ_HEAD_ID in its env file")
        return
    if settings.name or settings.model:
        try:
            client.llen(keys.queue(settings.served_name))
        except redis.exceptions.NoPermissionError:
            text = f"the account {account} may not serve {settings.served_name!r}: see SHARDQ_NAME in its env file"
            yield failed("heads", text)
    if head is None:
        yield place.lacks("heads", f"{head_id} is not alive: start it with `shardq head`", Role.HEAD)
    else:
        yield _head(place, head, Role.HEAD)
