"""What is said about a server that cannot be used: the true cause, the variable, what to do."""

from __future__ import annotations

import json
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from cli.next_steps import with_next_step
from relay.embedded import find_server
from relay.errors import RelayError, RelayRefused, RelayUnreachable
from relay.keys import new_tail_id
from relay.streams import RedisRelay
from relay.transport import TailInfo
from storage.database import Database
from storage.errors import DatabaseBusy, DatabaseUnavailable, DiskFull
from tasks.connection import as_task_error, connect, ping
from tasks.errors import QueueRefused, QueueUnreachable, TaskError
from tasks.heads import register_profile
from tasks.settings import TaskSettings
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of
from tests.redis_server import running_redis
from tests.secured_servers import free_port


def queue_says(url: str) -> TaskError:
    """What talking to a queue server ends with."""
    with closing(connect(TaskSettings(broker_url=url), timeout_s=1.0)) as client, pytest.raises(TaskError) as raised:
        ping(client)
    return raised.value


def wire_says(url: str) -> RelayError:
    """What talking to a wire server ends with."""
    with closing(RedisRelay(url)) as relay, pytest.raises(RelayError) as raised:
        relay.ping()
    return raised.value


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with a password, and an account that may only say hello."""
    with running_redis(tmp_path_factory.mktemp("locked"), password="s3cret") as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("ACL SETUSER guest on >guest -@all +@connection")
        yield server.port


class _OneAnswer(socketserver.BaseRequestHandler):
    """Answers each command of a connection with its server's `answer`."""

    server: _Answering

    def handle(self) -> None:
        while commands := self.request.recv(1 << 16):
            self.request.sendall(self.server.answer * commands.count(b"*"))


class _Answering(socketserver.ThreadingTCPServer):
    """A server that says one thing, whatever it is asked."""

    daemon_threads = True

    def __init__(self, answer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _OneAnswer)
        self.answer = answer


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """The port of such a server."""
    with _Answering(answer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("account", "said"),
    [
        ("", "names no user and password"),
        (":wrong@", "look at user and password in"),
        ("guest:guest@", "take the env file of this role from `shardq init-server`"),
    ],
)
def test_a_refused_login_or_command_names_what_is_wrong_with_it(locked: int, account: str, said: str) -> None:
    url = f"redis://{account}127.0.0.1:{locked}/0"
    if account.startswith("guest"):
        with closing(connect(TaskSettings(broker_url=url))) as client, pytest.raises(redis.RedisError) as raised:
            client.get("shardq:models")
        task_error = as_task_error(raised.value)
        with closing(RedisRelay(url)) as relay, pytest.raises(RelayRefused) as refused:
            relay.tails()
        relay_error: RelayError = refused.value
    else:
        task_error, relay_error = queue_says(url), wire_says(url)
    assert isinstance(task_error, QueueRefused)
    assert isinstance(relay_error, RelayRefused)
    for error in (task_error, relay_error):
        assert said in str(error)
        assert "running" not in str(error)


def test_a_database_that_the_server_or_the_account_has_not_is_told(locked: int, redis_url: str) -> None:
    missing = redis_url.rpartition("/")[0] + "/99"
    for error in (queue_says(missing), wire_says(missing)):
        assert isinstance(error, QueueRefused | RelayRefused)
        assert "no database of the number at the end of SHARDQ_" in str(error)
    denied = f"redis://guest:guest@127.0.0.1:{locked}/1"
    with redis.Redis(port=locked, password="s3cret") as admin:
        admin.execute_command("ACL SETUSER guest -select")
    for error in (queue_says(denied), wire_says(denied)):
        assert "end in /0" in str(error)


def test_a_password_for_a_server_without_one_is_told(redis_url: str) -> None:
    with_password = redis_url.replace("://", "://:s3cret@")
    for error in (queue_says(with_password), wire_says(with_password)):
        assert "the server knows no password" in str(error)


def test_a_port_at_which_nobody_listens_and_a_host_that_is_none_are_told_apart() -> None:
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    for error in (queue_says(nobody), wire_says(nobody)):
        assert isinstance(error, QueueUnreachable | RelayUnreachable)
        assert "nothing listens there" in str(error)
    nowhere = "redis://:s3cret@no-such-host.invalid:6379/0"
    for error in (queue_says(nowhere), wire_says(nowhere)):
        assert "no such host" in str(error)
        assert "s3cret" not in str(error)


def test_a_socket_file_is_used_and_one_that_is_not_there_is_told(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    process = subprocess.Popen([str(find_server()), "--port", "0", "--unixsocket", str(path)], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with closing(connect(TaskSettings(broker_url=f"unix://{path}"))) as client:
            ping(client)
        with closing(RedisRelay(f"unix://{path}")) as relay:
            assert relay.ping() > 0
    finally:
        process.terminate()
        process.wait(10)
    for error in (queue_says(f"unix://{tmp_path}/none"), wire_says(f"unix://{tmp_path}/none")):
        assert "no such socket file" in str(error)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no Redis: look at host and port in SHARDQ_"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "it has just started: wait"),
        (b"-ERR max number of clients reached\r\n", "maxclients"),
        (b"-DENIED Redis is running in protected mode because. More.\r\n", "protected mode: give it a password"),
        (b"-ERR unknown command 'PING'\r\n", "Redis 7 or a Valkey is needed"),
        (b"-MOVED 1 10.0.0.1:6379\r\n", "it is a cluster"),
    ],
)
def test_what_else_a_server_says_is_not_taken_for_silence(answer: bytes, said: str) -> None:
    with answering(answer) as port:
        for error in (queue_says(f"redis://127.0.0.1:{port}/0"), wire_says(f"redis://127.0.0.1:{port}/0")):
            assert said in str(error)
            assert "`shardq up`" not in str(error)


def test_a_wrong_database_number_is_told_by_status_submit_and_doctor(redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client, closing(RedisRelay(redis_url)) as relay:
        register_profile(client, "tiny", PROFILE)
        relay.announce(TailInfo(new_tail_id("b"), PROFILE, 5, 8, 65, time.time()))
        wrong = redis_url.rpartition("/")[0] + "/3"
        run = Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": wrong, "SHARDQ_RELAY_URL": wrong})
        said = "nobody is in database 3 of this server, but in database 0: let SHARDQ_{}_URL end in /0"
        assert said.format("BROKER") in run("status").stderr
        assert said.format("BROKER") in error_of(run("submit", "-", stdin=PROMPTS))
        shown = json.loads(run("doctor", "--json").stdout)
        failed = {each["check"]: each["text"] for each in shown if each["grade"] == "failed"}
        assert failed == {"queue": said.format("BROKER"), "wire": said.format("RELAY")}
        # the right one
        run = Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url, "SHARDQ_RELAY_URL": redis_url})
        assert "in database" not in run("status").stderr + run("doctor").stdout


def test_two_databases_of_one_server_for_queue_and_wire_are_no_mistake(redis_url: str, tmp_path: Path) -> None:
    wire = redis_url.rpartition("/")[0] + "/1"
    with closing(RedisRelay(wire)) as relay:
        relay.announce(TailInfo(new_tail_id("b"), PROFILE, 5, 8, 65, time.time()))
        run = Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url, "SHARDQ_RELAY_URL": wire})
        assert "in database" not in run("status").stderr + run("doctor").stdout


def test_a_database_that_cannot_be_used_says_why_in_sqlites_words_and_what_to_do(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no database at all, " * 100)
    with pytest.raises(DatabaseUnavailable, match=r"file is not a database \(the file is one of something else"):
        Database.open(f"sqlite:///{other}")
    step = with_next_step("x is locked by another process", DatabaseBusy)
    assert "SHARDQ_DATABASE_URL" not in step + with_next_step("the disk is full", DiskFull)
