"""`shardq server` on a host whose servers run: who gets in after the restart, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.cli_runner import Shardq
from tests.secured_servers import SecuredServer, SecuredServers, secured_servers

PORTS = {"queue": "SHARDQ_BROKER_URL", "wire": "SHARDQ_RELAY_URL"}


def gets_in(variables: dict[str, str], server: str) -> bool:
    url = f"{variables[PORTS[server]]}?ssl_ca_certs={variables['SHARDQ_TLS_CA']}"
    with redis.Redis.from_url(url) as client:
        try:
            client.get("shardq:head:nobody" if server == "queue" else "shardq:tail:nobody")
        except redis.AuthenticationError:
            return False
        except redis.exceptions.NoPermissionError:
            return True
    return True


def read_accounts(server: SecuredServer) -> None:
    """What a restart does: the server reads its file of accounts."""
    with server.admin() as admin:
        admin.execute_command("ACL", "LOAD")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[SecuredServers]:
    with secured_servers(tmp_path / "server") as running:
        yield running


def test_new_accounts_get_in_old_passwords_and_revoked_accounts_do_not_and_the_others_stay(
    servers: SecuredServers, tmp_path: Path
) -> None:
    run = Shardq(tmp_path / "data", {})
    before = {user: servers.variables(user) for user in servers.users()}
    for arguments in (
        ("add", "--head", "gpu-c=tiny", "--tail", "gpu-d"),
        ("rotate", "head-gpu-a", "client"),
        ("revoke", "tail-gpu-b"),
        ("update",),
    ):
        name, *others = arguments
        done = run("server", name, str(servers.directory), *others)
        assert done.exit_code == 0, done.stderr
    read_accounts(servers.queue)
    read_accounts(servers.wire)

    for user in ("head-gpu-a", "client"):
        for server in PORTS:
            assert not gets_in(before[user], server)
            assert gets_in(servers.variables(user), server)
    assert not gets_in(before["tail-gpu-b"], "wire")
    assert gets_in(servers.variables("head-gpu-c"), "queue")
    assert gets_in(servers.variables("head-gpu-c"), "wire")
    assert gets_in(servers.variables("tail-gpu-d"), "wire")
    for server in PORTS:
        assert gets_in(before["bookkeeper"], server)
    assert servers.variables("bookkeeper") == before["bookkeeper"]
