"""A server has numbered databases, and a wrong number in an address looks like a server where nobody is."""

from __future__ import annotations

from collections.abc import Callable

import redis


def found_elsewhere(client: redis.Redis, has_us: Callable[[redis.Redis], bool]) -> int | None:
    """The number of another database of the client's server that has what this one lacks.

    None if this one has it, if none has, or if the account may not look. Raises redis-py's errors.
    """
    if has_us(client):
        return None
    pool = client.connection_pool
    try:
        names = [name.removeprefix("db") for name in client.info("keyspace") if name.startswith("db")]
        for number in sorted(map(int, names)):
            options = {**pool.connection_kwargs, "db": number}
            with redis.Redis(connection_pool=redis.ConnectionPool(pool.connection_class, **options)) as other:
                found = has_us(other)
                other.connection_pool.disconnect()
            if found:
                return number
    except redis.ResponseError:
        return None  # accounts of `init-server` have database 0 only
    return None


def wrong_number(client: redis.Redis, number: int, setting: str) -> str:
    """What to say where `found_elsewhere` found something."""
    own = client.connection_pool.connection_kwargs.get("db", 0)
    return f"nobody is in database {own} of this server, but in database {number}: let {setting} end in /{number}"
