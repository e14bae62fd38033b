"""What the queue server knows about heads: who lives, what they serve, what they have taken."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis

from relay.databases import found_elsewhere, wrong_number
from relay.installed import installed_version
from relay.messages import FIRST_TOLD_FRAMES
from relay.plain import from_plain
from relay.profile import Profile
from relay.tail_figures import TailFigures
from tasks import keys
from tasks.connection import SETTING
from tasks.errors import HeadIdTaken, ModelNameInvalid, ProfileMismatch
from tasks.figures import HeadFigures
from tasks.generation import known_versions

#: milliseconds a head counts as alive after its last beat
PRESENCE_MS = 10_000
#: seconds between two beats
BEAT_S = 2.0
#: milliseconds for which the host's word stands: heads tell all the same while its bookkeeper is started anew
HOST_MS = 600_000
#: messages put back per round trip
RESTORED_AT_ONCE = 100

# `:` would run into the priorities of another name's queue.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")

_CLAIM = """
local value = redis.call('GET', KEYS[1])
if value and cjson.decode(value)['instance'] ~= ARGV[1] then return value end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return false
"""

# What cannot be read is no head's of ours: it must not keep one that lives from saying so.
# A host that does not say its version knows the first form only, and would take a head that tells more for none.
_BEAT = """#!lua flags=allow-oom
local value = redis.call('GET', KEYS[1])
local readable, other = pcall(function() return value and cjson.decode(value)['instance'] end)
if readable and other and other ~= ARGV[4] then return 0 end
redis.call('SET', KEYS[1], redis.call('GET', KEYS[3]) and ARGV[1] or ARGV[5], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
return 1
"""

_SAY_HOST = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
"""

_RESTORE = """#!lua flags=allow-oom
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[2])
redis.call('XADD', KEYS[4], 'MAXLEN', 1, '*', 'rung', '')
return 1
"""

_PUT_ASIDE = """#!lua flags=allow-oom
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', 1000, '*', 'kind', 'message', 'json', ARGV[2])
return 0
"""

_FORGET = """
if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return 0 end
return redis.call('SREM', KEYS[3], ARGV[1])
"""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """What a head tells about itself every two seconds."""

    head_id: str
    #: differs between two processes with the same `head_id`
    instance: str
    #: served name and profile
    model: str
    profile: Profile
    slots: int
    #: task ids the engine knows: in a slot, waiting for one, or finished but not yet recorded
    live: tuple[str, ...]
    #: whether the fronts take jobs (a tail is there)
    consuming: bool
    #: jobs that hold a slot
    running: int
    #: completion tokens per second over all jobs, now
    tokens_per_s: float
    #: Unix time at which the head process started
    started_at: float
    #: differs from beat to beat, whatever else stays the same
    beat: int = 0
    #: whether the head has the whole model and needs no tail
    whole: bool = False
    #: None from those who do not tell
    figures: HeadFigures | None = None
    #: of shardq; empty from those who do not tell
    version: str = ""
    #: highest version of the tasks that it takes (`tasks.generation`); it takes all earlier ones
    reads: int = 1
    #: highest version that it could read; above `reads` its account has no right to take them
    knows: int = 1
    #: version of its frames (`relay.messages.FRAME_VERSION`)
    frames: int = FIRST_TOLD_FRAMES
    #: why it takes no jobs, in words; None while it does, and from those who do not tell
    obstacle: str | None = None

    def to_json(self, *, first_form: bool = False) -> str:
        """This information as JSON text; `first_form`: what every host can read of it."""
        told = asdict(self)
        return json.dumps({name: told[name] for name in told if not (first_form and name in _TOLD_LATER)})

    @classmethod
    def from_json(cls, text: str | bytes) -> HeadInfo:
        """The information that `to_json` wrote, also in a later version, which may tell more.

        Raises ValueError or RecursionError for anything else.
        """
        return from_plain(cls, json.loads(text), _GROWING)


#: fields that no head told at first, and that hosts of that time refuse
_TOLD_LATER = ("version", "reads", "knows", "frames", "obstacle")
_GROWING = frozenset({HeadInfo, HeadFigures, TailFigures})


def claim(client: redis.Redis, info: HeadInfo) -> None:
    """A starting head's first beat. Raises HeadIdTaken while another instance's presence stands.

    After a crash that presence lapses within `PRESENCE_MS`: try again for a little longer than that.
    """
    presence, body = keys.head(info.head_id), info.to_json(first_form=True)
    other = client.eval(_CLAIM, 2, presence, keys.HEADS, info.instance, body, PRESENCE_MS, info.head_id)
    if other:
        found = json.loads(other)
        raise HeadIdTaken(
            f"another head is alive under the id {info.head_id!r} "
            f"(instance {found['instance']}, model {found['model']}); give this one another id (SHARDQ_HEAD_ID)"
        )


def beat(client: redis.Redis, info: HeadInfo) -> bool:
    """Renew the head's presence, also on a server short of memory. One round trip.

    False if another instance has claimed the id since this one's presence lapsed: its presence stands.
    """
    names = (keys.head(info.head_id), keys.HEADS, keys.HOST)
    arguments = (info.to_json(), PRESENCE_MS, info.head_id, info.instance, info.to_json(first_form=True))
    return bool(client.eval(_BEAT, len(names), *names, *arguments))


def say_host(client: redis.Redis) -> None:
    """The bookkeeper's word on which shardq keeps the books, from time to time: heads tell what that one can read."""
    client.eval(_SAY_HOST, 1, keys.HOST, installed_version(), HOST_MS)


def host_version(client: redis.Redis) -> str | None:
    """The shardq that keeps the books; None where none did lately, or one that does not say."""
    value = client.get(keys.HOST)
    return None if value is None else _text(value)


def readable_version(client: redis.Redis, model: str) -> int:
    """The highest version of a served name's tasks that this account may take.

    An account from before there were later versions has the lists of the first only: it may not even look at others.
    """
    for version in reversed(known_versions()[1:]):
        try:
            client.llen(keys.queue(model, version))
        except redis.exceptions.NoPermissionError:
            log.warning("this account may not take tasks of version %d: give it the rights of this version", version)
        else:
            return version
    return 1


def withdraw(client: redis.Redis, head_id: str) -> None:
    """The head leaves now; messages it has not acknowledged are restored by the bookkeeper."""
    client.delete(keys.head(head_id))


def known_heads(client: redis.Redis) -> set[str]:
    """The ids of all heads that may own unacknowledged messages, alive or not."""
    return {_text(name) for name in client.smembers(keys.HEADS)}


def live_heads(client: redis.Redis) -> list[HeadInfo]:
    """The heads whose presence stands, by id."""
    return [info for info in states(client).values() if info is not None]


def states(client: redis.Redis) -> dict[str, HeadInfo | None]:
    """What each known head tells, by id; None for one that is dead, or that tells what cannot be read."""
    return {name: _readable(value) if value else None for name, value in presences(client).items()}


def told_by(client: redis.Redis, head_id: str) -> HeadInfo | None:
    """What one head tells; None if it is dead, or tells what cannot be read."""
    value = client.get(keys.head(head_id))
    return _readable(value) if value else None


def _readable(value: bytes | str) -> HeadInfo | None:
    """A head of another version may tell other things; it must not stop those who look at all heads."""
    try:
        return HeadInfo.from_json(value)
    except (ValueError, RecursionError) as error:
        log.warning("a head's presence cannot be read: %s", error)
        return None


def presences(client: redis.Redis) -> dict[str, bytes | str | None]:
    """What each known head told last, by id; None for one whose presence does not stand."""
    names = sorted(known_heads(client))
    values = client.mget([keys.head(name) for name in names]) if names else []
    return dict(zip(names, values, strict=True))


def wrong_database(client: redis.Redis) -> str | None:
    """What is wrong with the address's database number, if this database knows nobody and another one does."""
    number = found_elsewhere(client, lambda each: bool(each.exists(keys.MODELS, keys.BOOKKEEPER)))
    return None if number is None else wrong_number(client, number, SETTING)


def forget_head(client: redis.Redis, head_id: str) -> bool:
    """Drop a head from the index, unless it is alive or messages of its are left."""
    names = (keys.head(head_id), keys.unacked(head_id), keys.HEADS)
    return bool(client.eval(_FORGET, len(names), *names, head_id))


def check_model_name(name: str) -> None:
    """Raises ModelNameInvalid for a name that no head may serve."""
    if not _MODEL_NAME.fullmatch(name):
        raise ModelNameInvalid(
            f"no model can be served as {name!r}: expected 1 to 128 letters, digits or any of . _ / @ + -, "
            "a letter or digit first"
        )


def register_profile(client: redis.Redis, name: str, profile: Profile) -> None:
    """Serve `profile` as `name`.

    Raises ModelNameInvalid, or ProfileMismatch if the name stands for another profile.
    """
    check_model_name(name)
    if client.hsetnx(keys.MODELS, name, json.dumps(profile.to_json())):
        return
    registered = registered_models(client).get(name, profile)
    differences = profile.differences(registered)
    if differences:
        raise ProfileMismatch(
            f"model {name!r} is registered with another profile (this head's ≠ the registered one's): "
            + "; ".join(differences)
        )


def registered_models(client: redis.Redis) -> dict[str, Profile]:
    """Every served name and its profile, by name."""
    values = client.hgetall(keys.MODELS)
    profiles = {_text(name): _profile(_text(name), values[name]) for name in sorted(values)}
    return {name: profile for name, profile in profiles.items() if profile is not None}


def _profile(name: str, value: bytes | str) -> Profile | None:
    try:
        return Profile.from_json(json.loads(value))
    except (ValueError, RecursionError) as error:
        log.warning("the profile registered as %.100r cannot be read: %s", name, error)
        return None


def forget_model(client: redis.Redis, name: str) -> bool:
    """Free a served name for another profile; False if it was not registered."""
    return bool(client.hdel(keys.MODELS, name))


def restore_unacked(client: redis.Redis, head_id: str | None, tags: Sequence[str] | None = None) -> int:
    """Put messages this head took but did not acknowledge back where they are served next.

    All of them, or those with these delivery tags. Each moves atomically, and only if it is still there:
    concurrent restores and late acknowledgements do no harm. For a front that hands back, a head that starts,
    and one whose presence lapsed. Two round trips and one per `RESTORED_AT_ONCE`. Returns the number moved.

    One that cannot be read is put aside: nobody could do it, and it must not keep back the others. Its job, if it
    has one, is found missing and queued anew.
    """
    unacked, index = keys.unacked(head_id), keys.unacked_index(head_id)
    taken: Any = client.zrange(index, 0, -1, withscores=True)
    taken_at: dict[Any, float] = dict(taken)
    messages = _unacked_messages(client, unacked, tags)
    # newest first, so that the oldest stands where the next one is taken
    ordered = sorted(messages, key=lambda tag: taken_at.get(tag, 0.0), reverse=True)
    moved = 0
    for start in range(0, len(ordered), RESTORED_AT_ONCE):
        pipeline = client.pipeline(transaction=False)
        for tag in ordered[start : start + RESTORED_AT_ONCE]:
            try:
                ready, bell, body = _redelivered(messages[tag])
            except (TypeError, ValueError, RecursionError) as error:
                log.error("put aside a taken message that cannot be read: %s", type(error).__name__)
                pipeline.eval(_PUT_ASIDE, 3, unacked, index, keys.REJECTED, tag, messages[tag])
            else:
                pipeline.eval(_RESTORE, 4, unacked, index, ready, bell, tag, body)
        moved += sum(int(done) for done in pipeline.execute())
    return moved


def _unacked_messages(client: redis.Redis, unacked: str, tags: Sequence[str] | None) -> dict[Any, Any]:
    """The stored messages by delivery tag (bytes): all, or those of `tags` that are there."""
    if tags is None:
        everything: dict[Any, Any] = client.hgetall(unacked)
        return everything
    values: Any = client.hmget(unacked, list(tags)) if tags else []
    return {tag.encode(): value for tag, value in zip(tags, values, strict=True) if value is not None}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _redelivered(stored: bytes) -> tuple[str, str, str]:
    """The ready list, its queue's bell and the body with which kombu would restore this message.

    Raises TypeError, ValueError or RecursionError for one that cannot be read.
    """
    message, _, routing_key = json.loads(stored)
    if not isinstance(message, dict) or not isinstance(routing_key, str):
        raise TypeError(f"expected message and routing key, got {type(message)} and {type(routing_key)}")
    headers, properties = message.get("headers"), message.get("properties")
    priority = 0
    if isinstance(headers, dict):
        headers["redelivered"] = True
    if isinstance(properties, dict):
        priority = int(properties.get("priority") or 0)
        info = properties.get("delivery_info")
        if isinstance(info, dict):
            info["redelivered"] = True
    ready = keys.ready_at(routing_key, min(max(priority, 0), keys.PRIORITIES[-1]))
    return ready, keys.bell(keys.queue_of(routing_key)), json.dumps(message)
