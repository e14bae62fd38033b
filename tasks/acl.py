"""Who may do what on the queue server: the least that each role needs, from the commands that are really sent.

A tail has no account there at all. Rules are those of `ACL SETUSER` (`relay.acl`). Keys whose names begin with
`_kombu.binding` tell kombu which queues an exchange feeds; channels are kombu's `/<database>.<exchange>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.acl import LOGIN, Grant
from tasks import keys

#: channel of Celery's control commands, and the pattern of its live events
CONTROL = "/0.celery.pidbox"
EVENTS = "/0.celeryev/*"

#: exchanges of Celery itself; every consumer helps to sweep their overdue bindings
_CELERY_EXCHANGES = ("celery.pidbox", "reply.celery.pidbox", "celeryev")
_DEADLINES = "_kombu.binding_deadlines"
#: any served name's lists
_ANY_QUEUE = "shardq.*"
_TRANSACTION = ("multi", "exec", "discard", "unwatch")
#: kombu looks for what is overdue by the server's clock; redis-py stores scripts by their hash
_SCRIPTS = ("time", "script|load", "script|exists")


def for_head(head_id: str, model: str | None = None) -> list[str]:
    """The head `head_id`, which serves `model` only; None: any name.

    It takes from and puts back into its queue, holds what it took under its own keys, and only appends to the
    results stream. It cannot read that stream, set or clear a stop, see other heads, or send a control
    command.
    """
    name = keys.queue(model or "*")
    queues, bell = [name, f"{name}{keys.SEPARATOR}[1-9]", f"{name}{keys.SEPARATOR}v*"], keys.bell(name)
    taken = [keys.unacked(head_id), keys.unacked_index(head_id)]
    presence = keys.head(head_id)
    # what its scripts name, beside the bindings
    named = [*queues, *taken, bell, keys.REJECTED, presence, keys.HEADS, keys.STOPS, keys.job("*"), keys.tries("*")]
    # of its fronts `<head>-<number>@<host>`
    mailboxes = [f"{head_id}-*.celery.pidbox", f"{head_id}-*.celery.pidbox{keys.SEPARATOR}[1-9]"]
    return _rules(
        Grant(("rpop", "rpush", "llen"), keys=queues),
        Grant(("xread", "xrevrange", "xadd"), keys=[bell]),
        Grant(("hset", "hgetall", "hmget", "hdel", "zadd", "zrem", "zrange"), keys=taken),
        Grant(("set", "get", "del"), keys=[presence, keys.job("*")]),
        Grant(("sadd", "srem", "scard", "expire", "del"), keys=[keys.tries("*")]),
        Grant(("sadd",), writes=[keys.HEADS]),
        Grant(("hsetnx", "hgetall"), keys=[keys.MODELS]),
        Grant(("hget", "hmget"), reads=[keys.STOPS]),
        Grant(("mget",), reads=[keys.follow("*")]),
        Grant(("xadd", "expire"), writes=[keys.followed_text("*")]),
        Grant(("xadd",), writes=[keys.RESULTS, keys.REJECTED]),
        Grant(("sadd", "smembers"), keys=_bindings(name)),
        _sweeping(),
        Grant(("del", "llen", "exists"), keys=mailboxes),
        Grant(("lpush",), writes=["*.reply.celery.pidbox"]),
        Grant(("eval", "evalsha"), keys=[*named, *_celery_bindings(), _DEADLINES]),
        Grant(("psubscribe", "punsubscribe"), channels=[CONTROL]),
        Grant(("publish",), channels=[EVENTS]),
    )


def for_bookkeeper() -> list[str]:
    """The bookkeeper keeps every key of ours, and alone may send control commands to Celery's workers.

    No administration: it can neither configure nor flush nor stop the server, nor look at its other clients.
    """
    return _rules(
        Grant(("eval", "evalsha"), keys=["shardq:*", _ANY_QUEUE, *_celery_bindings(), _DEADLINES]),
        Grant(("get", "set", "del", "unlink", "mget", "exists", "expire", "pexpire", "watch"), keys=["shardq:*"]),
        Grant(("sadd", "srem", "smembers", "scard", "sismember"), keys=["shardq:*"]),
        Grant(("hget", "hset", "hsetnx", "hdel", "hgetall", "hmget", "hlen", "hscan", "hkeys"), keys=["shardq:*"]),
        Grant(("zadd", "zrem", "zrange", "zscore", "zcard"), keys=["shardq:*"]),
        Grant(("xadd", "xlen", "xrange", "xreadgroup", "xgroup|create", "xack", "xdel", "xpending"), keys=["shardq:*"]),
        Grant(("lpush", "rpush", "lrange", "lrem", "llen", "exists", "memory|usage", "xadd"), keys=[_ANY_QUEUE]),
        Grant(("sadd", "smembers", "srem"), keys=_bindings(_ANY_QUEUE)),
        _sweeping(),
        Grant(("brpop", "llen", "del"), keys=["*.reply.celery.pidbox", f"*.reply.celery.pidbox{keys.SEPARATOR}[1-9]"]),
        Grant(("publish",), channels=[CONTROL]),
        Grant(("info",)),
    )


def for_client() -> list[str]:
    """Whoever submits: puts jobs into queues and looks at lengths, heads and served names.

    It cannot take a job out, read a waiting prompt or a result, or reach anybody's keys. A running job's text it can
    follow, if it knows the job's id: nobody but the database lists these.
    """
    return _rules(
        Grant(("lpush", "xadd"), writes=[_ANY_QUEUE]),
        Grant(("llen", "memory|usage"), reads=[_ANY_QUEUE]),
        Grant(("sadd", "smembers"), keys=_bindings(_ANY_QUEUE)),
        Grant(
            ("get", "mget", "exists", "smembers", "hget", "hgetall", "hkeys"),
            reads=[keys.HEADS, keys.head("*"), keys.MODELS, keys.BOOKKEEPER, keys.DATABASE],
        ),
        Grant(("xlen", "exists"), reads=[keys.RESULTS, keys.REJECTED, keys.UNKNOWN]),
        Grant(("set", "pexpire"), writes=[keys.follow("*")]),
        Grant(("xrange",), reads=[keys.followed_text("*")]),
        Grant(("info",)),
    )


def for_flower() -> list[str]:
    """The dashboard sees events, served names and lengths. It may not send control commands."""
    return _rules(
        Grant(("hkeys",), reads=[keys.MODELS]),
        # `shardq` is Celery's default queue, in which nothing ever stands
        Grant(("llen",), reads=[_ANY_QUEUE, "shardq", f"shardq{keys.SEPARATOR}[1-9]"]),
        Grant(("llen", "del", "exists"), keys=["celeryev.*"]),
        _sweeping(),
        Grant(("eval", "evalsha"), keys=[*_celery_bindings(), _DEADLINES]),
        Grant(("psubscribe", "punsubscribe"), channels=[EVENTS]),
    )


def _sweeping() -> Grant:
    """Celery's own bindings: refreshed by their consumers, removed by anybody once they are overdue."""
    commands = ("sadd", "srem", "smembers", "zadd", "zrem", "zrangebyscore", "exists", "del")
    return Grant(commands, keys=[*_celery_bindings(), _DEADLINES])


def _celery_bindings() -> list[str]:
    return [key for exchange in _CELERY_EXCHANGES for key in _bindings(exchange)]


def _bindings(exchange: str) -> list[str]:
    return [f"_kombu.binding.{exchange}", f"_kombu.binding_permanent.{exchange}"]


def _rules(*grants: Grant) -> list[str]:
    everybody: Sequence[str] = [*LOGIN, *(f"+{command}" for command in (*_TRANSACTION, *_SCRIPTS))]
    return [*everybody, *(grant.rule() for grant in grants)]
