"""What `shardq doctor` says about connections, and that it shows no password."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cli.doctor.findings import Finding, Grade
from cli.doctor.security import check_connection
from cli.errors import ExitCode
from relay.embedded import EmbeddedRedis
from relay.keys import new_tail_id
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.transport import TailInfo
from tasks import keys
from tasks.connection import connect
from tasks.heads import HeadInfo, beat, register_profile
from tasks.settings import TaskSettings
from tests.cli_runner import PROFILE, Shardq
from tests.redis_server import running_redis
from tests.secured_servers import HEAD_ID, MODEL, TAIL_NAME, SecuredServers, free_port, secured_servers


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
    assert found["queue"][0] == found["wire"][0] == "failed"
    assert "SHARDQ_TLS_CA" in found["queue"][1]
    # once for each server is enough
    assert "queue TLS" not in found


def security(url: str, server: str = "queue") -> dict[str, tuple[Grade, str]]:
    return {finding.check: (finding.grade, finding.text) for finding in check_connection(server, url, None)}


def test_a_password_that_travels_in_the_open_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # nobody answers there: what is told follows from the address
    monkeypatch.setattr("cli.doctor.security.CERTIFICATE_TIMEOUT_S", 0.2)
    found = security("redis://:s3cret@192.0.2.1:6379/0")
    assert found["queue TLS"][0] == Grade.WARNING
    assert "can be read on the way" in found["queue TLS"][1]
    assert "s3cret" not in str(found)


def test_this_machine_needs_no_tls() -> None:
    found = security("redis://127.0.0.1:1/0", "queue") | security("redis://127.0.0.1:1/0", "wire")
    assert {check: grade for check, (grade, _) in found.items()} == {"queue TLS": Grade.OK, "wire TLS": Grade.OK}


def test_a_server_that_lets_everybody_in_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def elsewhere(parts: object) -> bool:
        return False

    monkeypatch.setattr("cli.doctor.security.is_local", elsewhere)
    with running_redis(tmp_path / "open") as server:
        assert "lets everybody in" in open_ones(server)
    with running_redis(tmp_path / "closed", password="s3cret") as server:
        assert "lets everybody in" not in open_ones(server)


def open_ones(server: EmbeddedRedis) -> str:
    """What is said about a server whose address names a password, whether it asks for it or not."""
    found = security(f"redis://:s3cret@127.0.0.1:{server.port}/0")
    assert "s3cret" not in str(found)
    return str(found)


#: env file → role, what is not looked at under it
ENV_FILES = {
    "bookkeeper": ("host", set()),
    "client": ("client", set()),
    "flower": ("flower", {"heads", "wire"}),
    "head-gpu-a": ("head", {"bookkeeper"}),
    "tail-gpu-b": ("tail", {"queue", "tails"}),
}


@pytest.fixture
def at_work(servers: SecuredServers) -> Iterator[SecuredServers]:
    """A bookkeeper, a head with a tail and that tail, alive."""
    settings = TaskSettings(broker_url=servers.variables("head-gpu-a")["SHARDQ_BROKER_URL"], tls_ca=servers.ca)
    tail_url = servers.variables("tail-gpu-b")["SHARDQ_RELAY_URL"]
    info = HeadInfo(HEAD_ID, "one", MODEL, PROFILE, 4, (), True, 0, 0.0, time.time(), version="9.8")
    with closing(connect(settings)) as head, servers.queue.admin() as admin:
        register_profile(head, MODEL, PROFILE)
        admin.set(keys.HOST, "9.9")
        admin.set(keys.BOOKKEEPER, "one")
        assert beat(head, info)
        with closing(RedisRelay(tail_url, settings=RelaySettings(tls_ca=servers.ca))) as relay:
            relay.announce(TailInfo(new_tail_id(TAIL_NAME), PROFILE, 5, 8, 65, time.time()))
            servers.denied()
            yield servers
        admin.flushall()


def doctor(servers: SecuredServers, user: str, directory: Path, **changed: str) -> tuple[int, dict[str, Finding]]:
    """Exit status and findings by check, the worst of each."""
    result = Shardq(directory, servers.variables(user) | changed)("doctor", "--json")
    found = [Finding(each["check"], Grade(each["grade"]), each["text"]) for each in json.loads(result.stdout)]
    worst = [Grade.FAILED, Grade.WARNING, Grade.SKIPPED, Grade.OK]
    by_grade = sorted(found, key=lambda finding: worst.index(finding.grade), reverse=True)
    return result.exit_code, {finding.check: finding for finding in by_grade}


def test_every_env_file_of_init_server_is_known(servers: SecuredServers) -> None:
    assert set(servers.users()) == set(ENV_FILES)


@pytest.mark.parametrize("user", ENV_FILES)
def test_an_env_file_on_a_system_that_works_is_all_right(at_work: SecuredServers, user: str, tmp_path: Path) -> None:
    status, found = doctor(at_work, user, tmp_path)
    role, unseen = ENV_FILES[user]
    assert found["role"].text == f"{role}, by the account {user}"
    # the certificate of these servers is made to end soon
    others = {check: finding for check, finding in found.items() if not check.endswith(" TLS")}
    assert {check for check, finding in others.items() if finding.grade == Grade.SKIPPED} == unseen
    assert [finding for finding in others.values() if finding.grade not in (Grade.OK, Grade.SKIPPED)] == []
    assert status == ExitCode.OK
    # it asked for nothing that this account may not see
    assert at_work.denied() == []


def test_versions_of_host_and_head_are_told_where_they_may_be_seen(at_work: SecuredServers, tmp_path: Path) -> None:
    _, host = doctor(at_work, "bookkeeper", tmp_path)
    assert host["bookkeeper"].text == "alive, shardq 9.9"
    assert host["heads"].text.endswith("with 4 slots, shardq 9.8")
    _, head = doctor(at_work, "head-gpu-a", tmp_path)
    assert head["host"].text == "its bookkeeper is of shardq 9.9"
    assert head["heads"].text.endswith("shardq 9.8")


@pytest.mark.parametrize("user", ["head-gpu-a", "tail-gpu-b"])
def test_the_link_is_measured_as_far_as_the_account_may(at_work: SecuredServers, user: str, tmp_path: Path) -> None:
    result = Shardq(tmp_path, at_work.variables(user))("doctor", "--link")
    assert result.exit_code == ExitCode.OK, result.output
    assert "Mbit/s up" in result.stdout
    assert at_work.denied() == []


#: env file and what has stopped → the check that fails, and what to do
STOPPED = {
    ("bookkeeper", "bookkeeper"): ("bookkeeper", "shardq bookkeeper"),
    ("client", "bookkeeper"): ("bookkeeper", "shardq bookkeeper"),
    ("client", "head"): ("heads", "shardq head"),
    ("head-gpu-a", "head"): ("heads", "shardq head"),
    **{(user, "queue"): ("queue", "SHARDQ_BROKER_URL") for user in ENV_FILES if user != "tail-gpu-b"},
    **{(user, "wire"): ("wire", "SHARDQ_RELAY_URL") for user in ENV_FILES if user != "flower"},
}


@pytest.mark.parametrize(("user", "part"), STOPPED)
def test_the_part_that_has_stopped_is_the_line_that_fails(
    at_work: SecuredServers, user: str, part: str, tmp_path: Path
) -> None:
    changed = {}
    if part in ("queue", "wire"):
        variable = "SHARDQ_BROKER_URL" if part == "queue" else "SHARDQ_RELAY_URL"
        port = at_work.queue.port if part == "queue" else at_work.wire.port
        changed = {variable: at_work.variables(user)[variable].replace(f":{port}/", f":{free_port()}/")}
    else:
        with at_work.queue.admin() as admin:
            admin.delete(keys.BOOKKEEPER if part == "bookkeeper" else keys.head(HEAD_ID))
    status, found = doctor(at_work, user, tmp_path, **changed)
    check, cure = STOPPED[user, part]
    assert status == ExitCode.ERROR
    assert [finding.check for finding in found.values() if finding.grade == Grade.FAILED] == [check]
    assert cure in found[check].text


@pytest.mark.parametrize(
    ("user", "variable", "check"),
    [
        ("head-gpu-a", "SHARDQ_HEAD_ID", "heads"),
        ("head-gpu-a", "SHARDQ_NAME", "heads"),
        ("tail-gpu-b", "SHARDQ_TAIL_NAME", "tails"),
    ],
)
def test_a_name_that_the_account_may_not_bear_is_told(
    at_work: SecuredServers, user: str, variable: str, check: str, tmp_path: Path
) -> None:
    status, found = doctor(at_work, user, tmp_path, **{variable: "another"})
    assert (status, found[check].grade) == (ExitCode.ERROR, Grade.FAILED)
    assert variable in found[check].text
    at_work.denied()
