"""The admission lease of a job attempt: at most one head works on it at a time.

The same key holds the done marker once the outcome stands in the results stream (`tasks.results`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import redis

from tasks import keys

#: milliseconds a lease lives without being renewed
LEASE_MS = 30_000
#: value of the key once the attempt's outcome is published
DONE = "done"

_ACQUIRE = """
local value = redis.call('GET', KEYS[1])
if value == ARGV[3] then return 'done' end
if value and value ~= ARGV[1] then return 'taken' end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'held'
"""

_RENEW = """
local states = {}
for i, key in ipairs(KEYS) do
  local value = redis.call('GET', key)
  if value == ARGV[3] then states[i] = 'done'
  elseif value and value ~= ARGV[1] then states[i] = 'taken'
  else
    redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
    states[i] = 'held'
  end
end
return states
"""

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class LeaseState(StrEnum):
    """Who may work on a job attempt."""

    #: this head
    HELD = "held"
    #: another head, until it finishes or its lease lapses
    TAKEN = "taken"
    #: nobody any more: the outcome is published
    DONE = "done"


def acquire(client: redis.Redis, task_id: str, head_id: str, ttl_ms: int = LEASE_MS) -> LeaseState:
    """Take the lease if it is free or this head's own already; a second delivery to the same head is HELD."""
    return take(client, keys.job(task_id), _holder(head_id), ttl_ms)


def renew(client: redis.Redis, task_ids: Sequence[str], head_id: str, ttl_ms: int = LEASE_MS) -> dict[str, LeaseState]:
    """Extend these leases in one round trip. A lapsed one that nobody took is taken again (HELD)."""
    if not task_ids:
        return {}
    names = [keys.job(task_id) for task_id in task_ids]
    states = client.eval(_RENEW, len(names), *names, _holder(head_id), ttl_ms, DONE)
    return {task_id: _state(state) for task_id, state in zip(task_ids, states, strict=True)}


def release(client: redis.Redis, task_id: str, head_id: str) -> bool:
    """Give the lease back; False if it was not this head's (any more)."""
    return give_back(client, keys.job(task_id), _holder(head_id))


def take(client: redis.Redis, key: str, holder: str, ttl_ms: int) -> LeaseState:
    """`acquire` for any key and any kind of holder; also extends what the holder has."""
    return _state(client.eval(_ACQUIRE, 1, key, holder, ttl_ms, DONE))


def give_back(client: redis.Redis, key: str, holder: str) -> bool:
    """`release` for any key and any kind of holder."""
    return bool(client.eval(_RELEASE, 1, key, holder))


def _holder(head_id: str) -> str:
    return f"held:{head_id}"


def _state(value: bytes | str) -> LeaseState:
    return LeaseState(value.decode() if isinstance(value, bytes) else value)
