"""Both Redis servers as `shardq init-server` sets them up, as far as a Valkey without TLS can play them."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from relay.embedded import find_server
from relay.errors import EmbeddedRedisFailed
from tests.cli_runner import Shardq
from tests.tls_proxy import TlsProxy

#: an account for the test itself, to look at what was denied
ADMIN = "user admin on >admin ~* &* +@all"
#: the names of the head and the tail that the servers know
HEAD_ID, TAIL_NAME, MODEL = "gpu-a", "gpu-b", "tiny"
#: directives of what this Valkey was built without; in front of it stands `TlsProxy`
_TLS_ONLY = ("tls-", "port ")


@dataclass(frozen=True, slots=True)
class SecuredServer:
    """One of the two."""

    port: int
    #: without TLS, for the test alone
    plain_port: int

    def admin(self) -> redis.Redis:
        """A client that may do everything, past the proxy."""
        return redis.Redis(port=self.plain_port, username="admin", password="admin", decode_responses=True)


@dataclass(frozen=True, slots=True)
class SecuredServers:
    """The generated directory and the servers that run by it."""

    directory: Path
    queue: SecuredServer
    wire: SecuredServer

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.directory / "ca" / "ca.crt"

    def variables(self, user: str) -> dict[str, str]:
        """The generated environment of an account."""
        lines = (self.directory / "env" / f"{user}.env").read_text(encoding="utf-8").splitlines()
        pairs = [line.partition("=") for line in lines if not line.startswith("#")]
        return {name: value for name, _, value in pairs}

    def passwords(self) -> set[str]:
        """All passwords there are."""
        urls = [value for user in self.users() for value in self.variables(user).values() if "rediss://" in value]
        return {urlsplit(url).password or "" for url in urls}

    def users(self) -> list[str]:
        """All accounts."""
        return sorted(path.stem for path in (self.directory / "env").glob("*.env"))

    def denied(self) -> list[str]:
        """What either server denied since the last call: account, reason and object."""
        found = []
        for server in (self.queue, self.wire):
            with server.admin() as admin:
                found += [f"{e['username']}: {e['reason']} {e['object']} ({e['context']})" for e in admin.acl_log()]
                admin.acl_log_reset()
        return found


@contextmanager
def secured_servers(directory: Path, *options: str) -> Iterator[SecuredServers]:
    """Generate the files, start both servers by them and a TLS proxy in front of each."""
    ports = {"queue": free_port(), "wire": free_port()}
    init_server(
        directory,
        *("--host", "localhost", "--head", f"{HEAD_ID}={MODEL}", "--tail", TAIL_NAME),
        *("--ca-path", str(directory / "ca" / "ca.crt")),
        *("--queue-port", str(ports["queue"]), "--wire-port", str(ports["wire"])),
        *options,
    )
    with ExitStack() as stack:
        servers = {}
        for role, port in ports.items():
            plain_port = stack.enter_context(_valkey(directory / role))
            certificate, key = directory / "tls" / "server.crt", directory / "tls" / "server.key"
            stack.enter_context(TlsProxy(plain_port, certificate, key, port=port))
            servers[role] = SecuredServer(port, plain_port)
        yield SecuredServers(directory, **servers)


def init_server(directory: Path, *options: str) -> str:
    """Run the command in this process; what it printed."""
    result = Shardq(directory.parent / "data", {})("init-server", str(directory), *options)
    assert result.exit_code == 0, result.output
    return result.output


@contextmanager
def _valkey(directory: Path) -> Iterator[int]:
    """A Valkey with the generated configuration and accounts; its port."""
    try:
        server = find_server()
    except EmbeddedRedisFailed as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    port = free_port()
    lines = (directory / "redis.conf").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(_TLS_ONLY)]
    kept = ["bind 127.0.0.1" if line.startswith("bind ") else line for line in kept]
    (directory / "test.conf").write_text("\n".join([*kept, f"port {port}", "logfile test.log", ""]))
    with (directory / "users.acl").open("a", encoding="utf-8") as accounts:
        accounts.write(f"{ADMIN}\n")
    process = subprocess.Popen([str(server), "test.conf"], cwd=directory, stdin=subprocess.DEVNULL)
    try:
        _await(process, port)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        assert process.poll() is None, "the server does not start with the generated files"
        try:
            redis.Redis(port=port, username="admin", password="admin").ping()
            return
        except redis.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
