"""Every account against everything it has no right to, on servers set up as the public host's are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relay import keys as wire_keys
from tasks import acl as queue_acl
from tasks import keys
from tests.secured_servers import HEAD_ID, MODEL, SecuredServer, SecuredServers, secured_servers

#: a command and its arguments
Command = tuple[str, ...]

QUEUE_USERS = ("bookkeeper", "client", "flower", "head-gpu-a")
WIRE_USERS = ("bookkeeper", "client", "head-gpu-a", "tail-gpu-b")
#: both servers' accounts, to be tried against what nobody may do
ACCOUNTS = [*(("queue", user) for user in QUEUE_USERS), *(("wire", user) for user in WIRE_USERS)]
#: Redis' command groups in which nobody but the server's owner has any business
FORBIDDEN_GROUPS = ("admin", "dangerous")
#: commands of those groups that somebody needs: for the share of memory that is used
EXCEPTIONS = {"info": {"bookkeeper", "client"}}

TAIL, OTHER_TAIL = "gpu-b-01234567", "gpu-c-01234567"
UP, DOWN = wire_keys.up(TAIL, 1, 0), wire_keys.down(TAIL, 1, 0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServers]:
    with secured_servers(tmp_path_factory.mktemp("host") / "server") as running:
        yield running


def server_of(servers: SecuredServers, role: str) -> SecuredServer:
    return servers.queue if role == "queue" else servers.wire


def client_of(servers: SecuredServers, role: str, user: str) -> redis.Redis:
    """A client as the account's own variables say, over TLS."""
    variables = servers.variables(user)
    url = variables["SHARDQ_BROKER_URL" if role == "queue" else "SHARDQ_RELAY_URL"]
    return redis.Redis.from_url(url, ssl_ca_certs=variables["SHARDQ_TLS_CA"], decode_responses=True)


def allowed(servers: SecuredServers, role: str, user: str, commands: Iterable[Command]) -> list[Command]:
    """Those of the commands that the server would run for this account; none is run."""
    commands = list(commands)
    with server_of(servers, role).admin() as admin, admin.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command("ACL", "DRYRUN", user, *command)
        answers = pipeline.execute()
    return [command for command, answer in zip(commands, answers, strict=True) if str(answer) == "OK"]


def commands_of(servers: SecuredServers, role: str, group: str) -> list[Command]:
    """The group's commands, each with as many arguments as it needs to be looked at."""
    with server_of(servers, role).admin() as admin:
        names = sorted(admin.execute_command("ACL", "CAT", group))
        # in one word, so that redis-py leaves the reply as it is: name, arity, …
        arities = [abs(int(entry[1])) for entry in admin.execute_command("COMMAND INFO", *names)]
    words = [name.split("|") for name in names]
    return [(*name, *["1"] * (arity - len(name))) for name, arity in zip(words, arities, strict=True)]


@pytest.mark.parametrize(("role", "user"), ACCOUNTS)
@pytest.mark.parametrize("group", FORBIDDEN_GROUPS)
def test_no_account_may_run_a_command_of_a_forbidden_group(
    servers: SecuredServers, role: str, user: str, group: str
) -> None:
    commands = commands_of(servers, role, group)
    names = {"|".join(command).partition("|1")[0] for command in commands}
    assert {"config|set", "shutdown", "acl|setuser", "debug", "monitor", "module|load", "replicaof"} <= names
    permitted = {command[0] for command in allowed(servers, role, user, commands)}
    assert permitted == {
        name for name, users in EXCEPTIONS.items() if role == "queue" and name in names and user in users
    }


@pytest.mark.parametrize(("role", "user"), ACCOUNTS)
def test_no_account_may_do_anything_with_a_key_that_is_not_ours(servers: SecuredServers, role: str, user: str) -> None:
    for key in ("other", "shardq", "celery", "celery-task-meta-x", "unacked", "shardqx:1", "x:shardq:tail:y", "_kombu"):
        commands = [tuple(part.replace("KEY", key) for part in command) for command in ALL_KINDS]
        assert allowed(servers, role, user, commands) == []


#: a command of every kind that names a key
ALL_KINDS: Sequence[Command] = [
    ("GET", "KEY"),
    ("SET", "KEY", "v"),
    ("DEL", "KEY"),
    ("UNLINK", "KEY"),
    ("EXPIRE", "KEY", "1"),
    ("RENAME", "KEY", "KEY"),
    ("COPY", "KEY", "KEY"),
    ("DUMP", "KEY"),
    ("RESTORE", "KEY", "0", "x"),
    ("TYPE", "KEY"),
    ("OBJECT", "ENCODING", "KEY"),
    ("MGET", "KEY"),
    ("INCR", "KEY"),
    ("APPEND", "KEY", "x"),
    ("SETRANGE", "KEY", "0", "x"),
    ("SETBIT", "KEY", "0", "1"),
    ("PFADD", "KEY", "x"),
    ("GEOADD", "KEY", "1", "1", "x"),
    ("HGETALL", "KEY"),
    ("HSET", "KEY", "f", "v"),
    ("HDEL", "KEY", "f"),
    ("LRANGE", "KEY", "0", "1"),
    ("LPUSH", "KEY", "v"),
    ("LPOP", "KEY"),
    ("RPOP", "KEY"),
    ("BRPOP", "KEY", "1"),
    ("LMOVE", "KEY", "KEY", "LEFT", "LEFT"),
    ("SADD", "KEY", "v"),
    ("SMEMBERS", "KEY"),
    ("ZADD", "KEY", "1", "v"),
    ("ZRANGE", "KEY", "0", "1"),
    ("XADD", "KEY", "*", "f", "v"),
    ("XREAD", "STREAMS", "KEY", "0"),
    ("XRANGE", "KEY", "-", "+"),
    ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "KEY", ">"),
    ("XTRIM", "KEY", "MAXLEN", "0"),
    ("XDEL", "KEY", "1-1"),
    ("SORT", "KEY"),
    ("EVAL", "return 1", "1", "KEY"),
    ("WATCH", "KEY"),
]


@pytest.mark.parametrize(("role", "user"), ACCOUNTS)
def test_no_account_may_look_around_or_touch_its_surroundings(servers: SecuredServers, role: str, user: str) -> None:
    commands: list[Command] = [
        ("KEYS", "*"),
        ("RANDOMKEY",),
        ("DBSIZE",),
        ("SELECT", "1"),
        ("SWAPDB", "0", "1"),
        ("FLUSHALL",),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("CLIENT", "NO-EVICT", "on"),
        ("ACL", "LIST"),
        ("ACL", "WHOAMI"),
        ("FUNCTION", "LOAD", "x"),
        ("FCALL", "x", "0"),
        ("SCRIPT", "FLUSH"),
        ("SCRIPT", "KILL"),
        ("LATENCY", "RESET"),
        ("PUBSUB", "CHANNELS"),
        ("PUBLISH", "anything", "x"),
        ("SUBSCRIBE", "anything"),
        ("PSUBSCRIBE", "*"),
        ("SPUBLISH", "anything", "x"),
    ]
    assert allowed(servers, role, user, commands) == []


#: what each role must not do with the keys of others, and with its own
DENIALS: dict[tuple[str, str], Sequence[Command]] = {
    ("queue", "head-gpu-a"): [
        # another name's queue, and more than taking from its own
        ("RPOP", "shardq.other"),
        ("RPUSH", "shardq.other", "x"),
        ("XREAD", "STREAMS", "shardq.other:bell", "0"),
        ("LRANGE", f"shardq.{MODEL}", "0", "-1"),
        ("DEL", f"shardq.{MODEL}"),
        ("LPUSH", f"shardq.{MODEL}", "x"),
        ("RPOP", f"shardq.{MODEL}2"),
        # what other heads took, and their presence
        ("HGETALL", keys.unacked("gpu-z")),
        ("HDEL", keys.unacked("gpu-z"), "tag"),
        ("ZRANGE", keys.unacked_index("gpu-z"), "0", "-1"),
        ("EVAL", "return 1", "1", keys.unacked("gpu-z")),
        ("SET", keys.head("gpu-z"), "x"),
        ("GET", keys.head("gpu-z")),
        ("SMEMBERS", keys.HEADS),
        ("SREM", keys.HEADS, "gpu-z"),
        # results are appended, never read, never taken back
        ("XRANGE", keys.RESULTS, "-", "+"),
        ("XREAD", "STREAMS", keys.RESULTS, "0"),
        ("XREADGROUP", "GROUP", keys.RESULTS_GROUP, "c", "STREAMS", keys.RESULTS, ">"),
        ("XDEL", keys.RESULTS, "1-1"),
        ("XTRIM", keys.RESULTS, "MAXLEN", "0"),
        ("XACK", keys.RESULTS, keys.RESULTS_GROUP, "1-1"),
        ("XGROUP", "DESTROY", keys.RESULTS, keys.RESULTS_GROUP),
        ("DEL", keys.RESULTS),
        ("XRANGE", keys.REJECTED, "-", "+"),
        ("XADD", keys.UNKNOWN, "*", "f", "v"),
        ("SET", keys.DATABASE, "x"),
        # stops are the database's
        ("HSET", keys.STOPS, "t", "cancelled"),
        ("HDEL", keys.STOPS, "t"),
        ("DEL", keys.STOPS),
        # names are registered once
        ("HSET", keys.MODELS, "n", "x"),
        ("HDEL", keys.MODELS, "n"),
        ("SET", keys.BOOKKEEPER, "x"),
        ("GET", keys.BOOKKEEPER),
        ("EVAL", "return 1", "1", keys.BOOKKEEPER),
        # what others are sent
        ("SADD", "_kombu.binding.shardq.other", "x"),
        ("SMEMBERS", "_kombu.binding.shardq.other"),
        ("PUBLISH", queue_acl.CONTROL, "x"),
        ("PSUBSCRIBE", queue_acl.EVENTS),
        ("SUBSCRIBE", "/0.celeryev/worker.heartbeat"),
        ("PSUBSCRIBE", "/0.*"),
        ("INFO",),
        ("MEMORY", "USAGE", f"shardq.{MODEL}"),
    ],
    ("queue", "client"): [
        ("RPOP", f"shardq.{MODEL}"),
        ("BRPOP", f"shardq.{MODEL}", "1"),
        ("LRANGE", f"shardq.{MODEL}", "0", "-1"),
        ("LREM", f"shardq.{MODEL}", "0", "x"),
        ("DEL", f"shardq.{MODEL}"),
        ("XRANGE", keys.RESULTS, "-", "+"),
        ("XADD", keys.RESULTS, "*", "f", "v"),
        ("XREADGROUP", "GROUP", keys.RESULTS_GROUP, "c", "STREAMS", keys.RESULTS, ">"),
        ("HGETALL", keys.unacked(HEAD_ID)),
        ("GET", keys.job("t.1")),
        ("SET", keys.job("t.1"), "done"),
        ("SET", keys.head("x"), "x"),
        ("SADD", keys.HEADS, "x"),
        ("HSET", keys.MODELS, "n", "x"),
        ("HDEL", keys.MODELS, "n"),
        ("HSET", keys.STOPS, "t", "cancelled"),
        ("HGETALL", keys.STOPS),
        ("SET", keys.BOOKKEEPER, "x"),
        ("SET", keys.DATABASE, "x"),
        ("XRANGE", keys.UNKNOWN, "-", "+"),
        ("XDEL", keys.UNKNOWN, "1-1"),
        ("XRANGE", keys.REJECTED, "-", "+"),
        ("EVAL", "return 1", "1", keys.BOOKKEEPER),
        ("EVAL", "return redis.call('KEYS', '*')", "0"),
        ("PUBLISH", queue_acl.CONTROL, "x"),
        ("PUBLISH", "/0.celeryev/task.multi", "x"),
        ("PSUBSCRIBE", queue_acl.EVENTS),
        ("PSUBSCRIBE", queue_acl.CONTROL),
    ],
    ("queue", "flower"): [
        ("RPOP", f"shardq.{MODEL}"),
        ("LRANGE", f"shardq.{MODEL}", "0", "-1"),
        ("LPUSH", f"shardq.{MODEL}", "x"),
        ("XRANGE", keys.RESULTS, "-", "+"),
        ("HGETALL", keys.unacked(HEAD_ID)),
        ("GET", keys.head(HEAD_ID)),
        ("HGETALL", keys.MODELS),
        ("PUBLISH", queue_acl.CONTROL, "x"),
        ("PUBLISH", "/0.celeryev/task.multi", "x"),
        ("PSUBSCRIBE", queue_acl.CONTROL),
        ("SADD", f"_kombu.binding.shardq.{MODEL}", "x"),
        ("INFO",),
    ],
    ("queue", "bookkeeper"): [
        ("FLUSHDB",),
        ("CONFIG", "GET", "requirepass"),
        ("EVAL", "return 1", "1", "other"),
        ("BRPOP", f"shardq.{MODEL}", "1"),
        ("DEL", f"shardq.{MODEL}"),
        ("SUBSCRIBE", queue_acl.CONTROL),
        ("PUBLISH", "/0.other.pidbox", "x"),
    ],
    ("wire", "tail-gpu-b"): [
        ("XADD", UP, "*", "f", "v"),
        ("XREAD", "STREAMS", DOWN, "0"),
        ("XRANGE", UP, "-", "+"),
        ("XREADGROUP", "GROUP", "g", "c", "STREAMS", UP, ">"),
        ("XTRIM", DOWN, "MAXLEN", "0"),
        ("DEL", UP),
        ("DEL", wire_keys.presence(TAIL)),
        ("GET", wire_keys.presence(TAIL)),
        ("GET", wire_keys.lease(TAIL)),
        ("SET", wire_keys.lease(TAIL), "x"),
        ("INCR", wire_keys.epoch(TAIL)),
        ("EVAL", "return 1", "0"),
        ("SCAN", "0"),
        ("XREAD", "STREAMS", wire_keys.up(OTHER_TAIL, 1, 0), "0"),
        ("XREAD", "STREAMS", wire_keys.hello(OTHER_TAIL), "0"),
        ("XADD", wire_keys.down(OTHER_TAIL, 1, 0), "*", "f", "v"),
        ("SET", wire_keys.presence(OTHER_TAIL), "x"),
        ("SET", wire_keys.presence("gpu-b-c-01234567"), "x"),
        ("MULTI",),
    ],
    ("wire", "head-gpu-a"): [
        ("XREAD", "STREAMS", UP, "0"),
        ("XRANGE", DOWN, "-", "+"),
        ("SET", wire_keys.presence(TAIL), "x"),
        ("DEL", wire_keys.presence(TAIL)),
        ("UNLINK", wire_keys.presence(TAIL)),
        ("EXPIRE", wire_keys.presence(TAIL), "1"),
        ("EVAL", "return 1", "1", "shardq:results"),
    ],
    **{
        ("wire", user): [
            ("XREAD", "STREAMS", UP, "0"),
            ("XREAD", "STREAMS", DOWN, "0"),
            ("XADD", UP, "*", "f", "v"),
            ("SET", wire_keys.lease(TAIL), "x"),
            ("SET", wire_keys.presence(TAIL), "x"),
            ("DEL", wire_keys.presence(TAIL)),
            ("GET", wire_keys.epoch(TAIL)),
            ("EVAL", "return 1", "0"),
        ]
        for user in ("bookkeeper", "client")
    },
}


@pytest.mark.parametrize(("role", "user"), DENIALS)
def test_an_account_is_denied_what_is_not_its_business(servers: SecuredServers, role: str, user: str) -> None:
    assert allowed(servers, role, user, DENIALS[role, user]) == []


def test_every_account_has_denials_of_its_own() -> None:
    assert set(DENIALS) == set(ACCOUNTS)


def test_denials_are_real_and_not_only_dry(servers: SecuredServers) -> None:
    for (role, user), commands in DENIALS.items():
        with client_of(servers, role, user) as client:
            for command in commands[:4]:
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command)


def test_a_script_gives_no_right_that_its_account_has_not(servers: SecuredServers) -> None:
    with client_of(servers, "queue", "head-gpu-a") as head:
        for call in (
            f"redis.call('HSET', '{keys.STOPS}', 't', 'x')",
            f"redis.call('XRANGE', '{keys.RESULTS}', '-', '+')",
            f"redis.call('HGETALL', '{keys.unacked('gpu-z')}')",
            "redis.call('KEYS', '*')",
            f"redis.call('PUBLISH', '{queue_acl.CONTROL}', 'x')",
        ):
            with pytest.raises(redis.ResponseError, match=r"NOPERM|ACL"):
                head.eval(f"return {call}", 1, keys.STOPS)


@pytest.mark.parametrize(
    ("role", "user", "password_of"),
    [
        ("queue", "head-gpu-a", "tail-gpu-b"),
        ("wire", "head-gpu-a", "tail-gpu-b"),
        ("wire", "tail-gpu-b", "head-gpu-a"),
        ("queue", "tail-gpu-b", "tail-gpu-b"),
        ("queue", "bookkeeper", "client"),
        ("wire", "default", "head-gpu-a"),
        ("queue", "admin2", "client"),
    ],
)
def test_a_wrong_password_or_account_gets_nobody_in(
    servers: SecuredServers, role: str, user: str, password_of: str
) -> None:
    urls = servers.variables(password_of)
    for name in ("SHARDQ_BROKER_URL", "SHARDQ_RELAY_URL"):
        if name in urls:
            with _login(servers, role, user, urlsplit(urls[name]).password) as client:
                if (user, name) == (password_of, "SHARDQ_RELAY_URL" if role == "wire" else "SHARDQ_BROKER_URL"):
                    continue
                with pytest.raises(redis.AuthenticationError):
                    client.ping()


def test_without_a_name_nobody_gets_in(servers: SecuredServers) -> None:
    for role in ("queue", "wire"):
        for password in (None, "", "admin"):
            with _login(servers, role, None, password) as client, pytest.raises(redis.AuthenticationError):
                client.ping()


def _login(servers: SecuredServers, role: str, user: str | None, password: str | None) -> redis.Redis:
    return redis.Redis(
        host="localhost",
        port=server_of(servers, role).port,
        username=user,
        password=password,
        ssl=True,
        ssl_ca_certs=str(servers.ca),
        # a refused login is tried again for seconds otherwise
        retry=Retry(NoBackoff(), 0),
    )
