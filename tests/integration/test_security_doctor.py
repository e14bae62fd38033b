"""What `shardq doctor` says about connections, and that it shows no password."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.doctor.findings import Grade
from cli.doctor.security import check_security
from relay.embedded import EmbeddedRedis
from tests.cli_runner import Shardq
from tests.redis_server import running_redis
from tests.secured_servers import SecuredServers, secured_servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServers]:
    with secured_servers(tmp_path_factory.mktemp("host") / "server", "--days", "20") as running:
        yield running


def findings(run: Shardq, **environment: str) -> dict[str, tuple[str, str]]:
    """Grade and text by check; the last one of each."""
    found = json.loads(run("doctor", "--json", **environment).stdout)  # type: ignore[arg-type]
    return {finding["check"]: (finding["grade"], finding["text"]) for finding in found}


def test_a_certificate_that_ends_soon_is_told_and_no_password(servers: SecuredServers, tmp_path: Path) -> None:
    run = Shardq(tmp_path, servers.variables("bookkeeper"))
    found = findings(run)
    for check in ("queue TLS", "wire TLS"):
        assert found[check] == ("warning", "the server's certificate ends in 20 days: renew it")
    assert not [password for password in servers.passwords() if password in json.dumps(found)]
    assert [denial for denial in servers.denied() if "config" in denial or "bookkeeper" in denial] == []


def test_verification_that_is_switched_off_is_told(servers: SecuredServers, tmp_path: Path) -> None:
    variables = servers.variables("bookkeeper")
    run = Shardq(tmp_path, variables)
    grade, text = findings(run, SHARDQ_BROKER_URL=f"{variables['SHARDQ_BROKER_URL']}?ssl_cert_reqs=none")["queue TLS"]
    assert grade == "warning"
    assert "switches verification off" in text


def test_a_certificate_that_is_not_accepted_is_an_error(servers: SecuredServers, tmp_path: Path) -> None:
    found = findings(Shardq(tmp_path, {**servers.variables("bookkeeper"), "SHARDQ_TLS_CA": ""}))
    assert found["queue TLS"][0] == found["queue"][0] == "failed"
    assert "SHARDQ_TLS_CA" in found["queue TLS"][1]


def security(monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, tuple[Grade, str]]:
    for name in ("SHARDQ_BROKER_URL", "SHARDQ_RELAY_URL"):
        monkeypatch.setenv(name, url)
    return {finding.check: (finding.grade, finding.text) for finding in check_security()}


def test_a_password_that_travels_in_the_open_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # nobody answers there: what is told follows from the address
    monkeypatch.setattr("cli.doctor.security.CERTIFICATE_TIMEOUT_S", 0.2)
    found = security(monkeypatch, "redis://:s3cret@192.0.2.1:6379/0")
    assert found["queue TLS"][0] == Grade.WARNING
    assert "can be read on the way" in found["queue TLS"][1]
    assert "s3cret" not in str(found)


def test_this_machine_needs_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    found = security(monkeypatch, "redis://127.0.0.1:1/0")
    assert {grade for grade, _ in found.values()} == {Grade.OK}


def test_a_server_that_lets_everybody_in_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def elsewhere(parts: object) -> bool:
        return False

    monkeypatch.setattr("cli.doctor.security.is_local", elsewhere)
    with running_redis(tmp_path / "open") as server:
        assert "lets everybody in" in open_ones(monkeypatch, server)
    with running_redis(tmp_path / "closed", password="s3cret") as server:
        assert "lets everybody in" not in open_ones(monkeypatch, server)


def open_ones(monkeypatch: pytest.MonkeyPatch, server: EmbeddedRedis) -> str:
    """What is said about a server whose address names a password, whether it asks for it or not."""
    found = security(monkeypatch, f"redis://:s3cret@127.0.0.1:{server.port}/0")
    assert "s3cret" not in str(found)
    return str(found)
