"""The wire server and the tails on it, as far as the account may see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing

from cli.doctor.findings import Finding, failed, ok, skipped, warning
from cli.doctor.roles import Place, Role
from cli.doctor.security import check_connection
from cli.output import counted
from cli.reasons import idle_heads
from relay.errors import RelayError, RelayRefused
from relay.guard import redact
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import TailInfo
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import HeadInfo, live_heads
from tasks.settings import TaskSettings
from workers.settings import HeadSettings, TailSettings

#: end of a tail's id that no process gets
_NO_PROCESS = "0" * 8


def check_wire(place: Place, model: str | None) -> Iterator[Finding]:
    """The wire server and the tails on it."""
    if unneeded := _needs_no_wire(place, model):
        yield skipped("wire", unneeded)
        return
    settings = RelaySettings()
    try:
        with closing(RedisRelay(settings.url, allow_insecure=TaskSettings().allow_insecure)) as relay:
            yield ok("wire", f"{redact(settings.url)}, round trip {1000 * relay.ping():.1f} ms")
            yield from check_connection("wire", settings.url, settings.tls_ca)
            yield from _own_tail(place, relay) if place.role == Role.TAIL else _tails(place, relay)
    except RelayError as error:
        if _all_whole(place):
            yield ok("wire", "not needed: every head that is alive has the whole model")
        else:
            yield failed("wire", str(error))


def _needs_no_wire(place: Place, model: str | None) -> str | None:
    """Why this role has no use for the wire server; None if it has."""
    if place.role == Role.FLOWER:
        return "Flower needs none"
    if place.role == Role.HEAD and HeadSettings(model=model or "").whole:
        return "not needed: this head has the whole model"
    if place.role == Role.CLIENT and os.environ.get("SHARDQ_BROKER_URL") and not os.environ.get("SHARDQ_RELAY_URL"):
        return "a client needs none, and SHARDQ_RELAY_URL names none"
    return None


def _tails(place: Place, relay: RedisRelay) -> Iterator[Finding]:
    tails = relay.tails()
    if not tails and place.wire_account is None and (wrong := relay.wrong_database()):
        yield failed("wire", wrong)
    elif not tails and not _all_whole(place):
        yield warning("tails", "none is alive: start one with `shardq tail`")
    heads = _living_heads(place)
    for tail in tails:
        layers = "no layers before a head has chosen the split" if tail.split is None else f"layers from {tail.split}"
        text = f"{tail.tail}, {layers}, up to {counted(tail.slots, 'slot')}"
        misfit = _misfit(tail, heads)
        yield ok("tails", text) if misfit is None else warning("tails", f"{text}, but {misfit}")


def _misfit(tail: TailInfo, heads: Sequence[HeadInfo]) -> str | None:
    """What keeps idle heads from this tail, which serves no other; None if nothing is known to."""
    if any(head.consuming and head.figures is not None and head.figures.tail_id == tail.tail for head in heads):
        return None
    return "; ".join(said for said in idle_heads(heads, [tail]) if tail.tail in said) or None


def _own_tail(place: Place, relay: RedisRelay) -> Iterator[Finding]:
    """Whether the account may be this tail, and whether it is alive where that can be seen."""
    name, account = TailSettings(model="").tail_name, place.wire_account
    try:
        # what it reads first of all
        relay.await_hello(f"{name}-{_NO_PROCESS}", 0, 0.0)
    except RelayRefused:
        yield failed("tails", f"the account {account} may not be tail {name!r}: see SHARDQ_TAIL_NAME in its env file")
        return
    if account is not None:
        text = f"a tail's account may not see who lives, {name} included: ask the host, or look into the tail's log"
        yield skipped("tails", text)
    elif any(tail.tail.rpartition("-")[0] == name for tail in relay.tails()):
        yield ok("tails", f"{name} is alive")
    else:
        yield place.lacks("tails", f"{name} is not alive: start it with `shardq tail`", Role.TAIL)


def _all_whole(place: Place) -> bool:
    """Whether heads are alive, and all of them are whole, as far as this role may see."""
    heads = _living_heads(place)
    return bool(heads) and all(head.whole for head in heads)


def _living_heads(place: Place) -> list[HeadInfo]:
    """The heads that this role sees."""
    if place.role not in (Role.HOST, Role.CLIENT):
        return []
    try:
        with closing(connect(TaskSettings())) as client, translated():
            return live_heads(client)
    except TaskError:
        return []
