"""Every Redis key of the relay.

A tail's id is `<name>-<8 hex digits>`, so one ACL pattern per tail *name* covers all of its processes without
covering those of another name: see `relay.acl`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets

from relay.errors import RelayRefused
from relay.profile import Profile

#: no colon (it separates key parts) and nothing that a glob pattern would read as more than itself
_TAIL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SUFFIX = re.compile(r"[0-9a-f]{8}")

#: glob over presence and lease keys
TAILS_PATTERN = "shardq:tail:*"
_LEASE_SUFFIX = ":lease"
#: of an entry id, which an epoch must fit
_MAX_EPOCH_DIGITS = 20


def new_tail_id(name: str) -> str:
    """An id for this process of the tail `name`; raises `RelayRefused` for a name unfit for a key."""
    if not _TAIL_NAME.fullmatch(name):
        raise RelayRefused(f"tail name {name!r}: use 1 to 63 letters, digits, '.', '_' or '-'")
    return f"{name}-{secrets.token_hex(4)}"


def tail_name(tail: str) -> str:
    """The name inside a tail id; raises `RelayRefused` if `tail` is none."""
    name, _, suffix = tail.rpartition("-")
    if not _TAIL_NAME.fullmatch(name) or not _SUFFIX.fullmatch(suffix):
        raise RelayRefused(f"tail id {tail!r}: expected <name>-<8 hex digits>")
    return name


def presence(tail: str) -> str:
    """JSON of a living tail; expires soon after its last refresh."""
    return f"shardq:tail:{tail}"


def lease(tail: str) -> str:
    """Token of the head that holds the tail; expires soon after its last renewal."""
    return f"shardq:tail:{tail}{_LEASE_SUFFIX}"


def is_presence(key: str) -> bool:
    """Whether a key found by `TAILS_PATTERN` is a presence key."""
    return not key.endswith(_LEASE_SUFFIX)


def split(profile: Profile) -> str:
    """The first layer of the tail's half, as living heads of this profile cut; expires soon after its last refresh."""
    text = json.dumps(profile.to_json(), sort_keys=True)
    return f"shardq:split:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def epoch(tail: str) -> str:
    """Counter of a tail's epochs."""
    return f"shardq:link:{tail}:epoch"


def hello(tail: str) -> str:
    """Stream of the newest hello, entry id `<epoch>-0`."""
    return f"shardq:link:{tail}:hello:up"


def up(tail: str, epoch: int, lane: int) -> str:
    """Stream of one lane's frames from head to tail."""
    return f"shardq:link:{tail}:{epoch}:{lane}:up"


def down(tail: str, epoch: int, lane: int) -> str:
    """Stream of one lane's frames from tail to head."""
    return f"shardq:link:{tail}:{epoch}:{lane}:down"


def lanes(tail: str, epoch: int, num_lanes: int) -> list[str]:
    """All frame streams of one epoch."""
    return [key(tail, epoch, lane) for lane in range(num_lanes) for key in (up, down)]


def new_probe() -> str:
    """Stream of one measurement of the link; expires."""
    return f"shardq:probe:{secrets.token_hex(8)}"


def links_pattern(tail: str) -> str:
    """Glob over everything a tail's epochs leave behind."""
    return f"shardq:link:{tail}:*"


def epoch_of(key: str) -> int | None:
    """The epoch of a frame stream's key, None for the counter and the hello stream."""
    number = key.split(":")[3]
    return int(number) if number.isdecimal() and len(number) <= _MAX_EPOCH_DIGITS else None
