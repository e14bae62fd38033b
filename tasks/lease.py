"""The admission lease of a job attempt: at most one head works on it at a time.

The same key holds the done marker once the outcome stands in the results stream (`tasks.results`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import redis

from tasks import keys
from tasks.generation import StopReason

#: milliseconds a lease lives without being renewed
LEASE_MS = 12_000
#: value of the key once the attempt's outcome is published
DONE = "done"
#: seconds for which the tries of an attempt are remembered after the last one
TRIES_S = 24 * 3600

# Leases are small and renewed: a server short of memory must not make those who work look dead.
#: first line of a script that may write on a server that is full
ALLOW_OOM = "#!lua flags=allow-oom\n"

_TAKE = (
    ALLOW_OOM
    + """
local value = redis.call('GET', KEYS[1])
if value == ARGV[3] then return 'done' end
if value and value ~= ARGV[1] then return 'taken' end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'held'
"""
)

_ACQUIRE = (
    ALLOW_OOM
    + """
local value = redis.call('GET', KEYS[1])
if value == ARGV[3] then return {'done', 0, false} end
if value and value ~= ARGV[1] then return {'taken', 0, false} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local stop = redis.call('HGET', KEYS[3], ARGV[4])
if stop then return {'held', 0, stop} end
redis.call('SADD', KEYS[2], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[6])
return {'held', redis.call('SCARD', KEYS[2]), false}
"""
)

_RENEW = (
    ALLOW_OOM
    + """
local states = {}
local alive = redis.call('GET', KEYS[#KEYS])
for i = 1, #KEYS - 1 do
  local key = KEYS[i]
  local value = redis.call('GET', key)
  if value == ARGV[3] then states[i] = 'done'
  elseif value and value ~= ARGV[1] or not value and not alive then states[i] = 'taken'
  else
    redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
    states[i] = 'held'
  end
end
return states
"""
)

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class LeaseState(StrEnum):
    """Who may work on a job attempt."""

    #: this head
    HELD = "held"
    #: another head, until it finishes or its lease lapses; or whoever comes first, but not this one
    TAKEN = "taken"
    #: nobody any more: the outcome is published
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a delivery of an attempt."""

    state: LeaseState
    #: HELD and not stopped: engine instances that were given the attempt, this one included; else 0
    tries: int
    #: HELD only: the attempt is to end without an engine
    stopped: StopReason | None


def acquire(client: redis.Redis, task_id: str, head_id: str, instance: str, ttl_ms: int = LEASE_MS) -> Admission:
    """Take the lease if it is free or this head's own already; a second delivery to the same head is HELD.

    `instance` names the engine process: each that gets the attempt is one try. One round trip.
    """
    names = (keys.job(task_id), keys.tries(task_id), keys.STOPS)
    arguments = (_holder(head_id), ttl_ms, DONE, task_id, instance, TRIES_S)
    state, tries, stop = client.eval(_ACQUIRE, len(names), *names, *arguments)
    return Admission(_state(state), int(tries), StopReason(_text(stop)) if stop else None)


def give_up_try(client: redis.Redis, task_id: str, instance: str) -> bool:
    """The engine hands the attempt back in good order: that was no try. False if it counted none."""
    return bool(client.srem(keys.tries(task_id), instance))


def renew(client: redis.Redis, task_ids: Sequence[str], head_id: str, ttl_ms: int = LEASE_MS) -> dict[str, LeaseState]:
    """Extend these leases in one round trip.

    A lapsed one that nobody took is taken again (HELD), unless the head looks dead: then others shall have it.
    """
    if not task_ids:
        return {}
    names = [*(keys.job(task_id) for task_id in task_ids), keys.head(head_id)]
    states = client.eval(_RENEW, len(names), *names, _holder(head_id), ttl_ms, DONE)
    return {task_id: _state(state) for task_id, state in zip(task_ids, states, strict=True)}


def release(client: redis.Redis, task_id: str, head_id: str) -> bool:
    """Give the lease back; False if it was not this head's (any more)."""
    return give_back(client, keys.job(task_id), _holder(head_id))


def release_all(client: redis.Redis, task_ids: Sequence[str], head_id: str) -> int:
    """Give back what of these leases is this head's, for a head that is dead; the number."""
    pipeline = client.pipeline(transaction=False)
    for task_id in task_ids:
        pipeline.eval(_RELEASE, 1, keys.job(task_id), _holder(head_id))
    return sum(int(released) for released in pipeline.execute())


def take(client: redis.Redis, key: str, holder: str, ttl_ms: int) -> LeaseState:
    """The lease itself, for any key and any kind of holder; also extends what the holder has."""
    return _state(client.eval(_TAKE, 1, key, holder, ttl_ms, DONE))


def give_back(client: redis.Redis, key: str, holder: str) -> bool:
    """`release` for any key and any kind of holder."""
    return bool(client.eval(_RELEASE, 1, key, holder))


def _holder(head_id: str) -> str:
    return f"held:{head_id}"


def _state(value: bytes | str) -> LeaseState:
    return LeaseState(_text(value))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
