"""What `shardq init-server` writes and refuses, and the accounts it makes."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from cryptography import x509

from relay import acl as wire_acl
from tasks import acl as queue_acl
from tasks import keys
from tests.cli_runner import Shardq, error_of
from tests.secured_servers import init_server


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("host") / "server"
    init_server(
        directory, "--host", "Queue.example.org", "--host", "198.51.100.7", "--head", "gpu-a=tiny", "--head", "gpu-c"
    )
    return directory


def variables(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    for path in sorted((directory / "env").iterdir()):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        yield path.stem, {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_there_is_a_file_of_variables_for_every_account(directory: Path) -> None:
    assert [user for user, _ in variables(directory)] == [
        *("bookkeeper", "client", "flower", "head-gpu-a", "head-gpu-c", "tail")
    ]


def test_only_their_owner_may_read_what_holds_a_secret(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    secret = [*directory.glob("env/*"), directory / "tls" / "server.key", *directory.glob("*/users.acl")]
    secret += [directory / "web" / "users", directory / "web" / "password"]
    assert len(secret) == 11
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


def test_passwords_are_random_differ_and_stand_in_the_env_files_only(directory: Path) -> None:
    urls = [value for _, values in variables(directory) for value in values.values() if "rediss://" in value]
    passwords = [urlsplit(url).password or "" for url in urls]
    assert len(set(passwords)) == len(passwords) == 10
    # 32 bytes in base64: 256 bits
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", password) for password in passwords)
    others = [path for path in directory.rglob("*") if path.is_file() and path.parent.name != "env"]
    contents = "".join(path.read_text() for path in others)
    assert not [password for password in passwords if password in contents]
    assert contents.count(" on #") == 10


def test_a_tail_has_no_account_on_the_queue_server(directory: Path) -> None:
    assert "user tail" not in (directory / "queue" / "users.acl").read_text()
    assert "user tail on " in (directory / "wire" / "users.acl").read_text()
    assert "SHARDQ_BROKER_URL" not in dict(variables(directory))["tail"]
    assert "SHARDQ_RELAY_URL" not in dict(variables(directory))["flower"]


def test_nobody_gets_in_without_a_name(directory: Path) -> None:
    for role in ("queue", "wire"):
        first = (directory / role / "users.acl").read_text().splitlines()[0]
        assert first == "user default off resetpass resetkeys resetchannels -@all"


def test_a_head_is_told_its_id_and_the_name_it_may_serve(directory: Path) -> None:
    found = dict(variables(directory))
    assert (found["head-gpu-a"]["SHARDQ_HEAD_ID"], found["head-gpu-a"]["SHARDQ_NAME"]) == ("gpu-a", "tiny")
    assert "SHARDQ_NAME" not in found["head-gpu-c"]
    assert found["tail"]["SHARDQ_TAIL_NAME"] == "tail"


def test_heads_and_tails_use_the_public_name_and_the_host_itself_localhost(directory: Path) -> None:
    found = dict(variables(directory))
    assert urlsplit(found["head-gpu-a"]["SHARDQ_BROKER_URL"]).hostname == "queue.example.org"
    assert found["head-gpu-a"]["SHARDQ_TLS_CA"] == "/etc/shardq/ca.crt"
    assert urlsplit(found["bookkeeper"]["SHARDQ_BROKER_URL"]).hostname == "localhost"
    assert found["bookkeeper"]["SHARDQ_TLS_CA"] == str(directory / "ca" / "ca.crt")
    servers = [
        values[name]
        for values in found.values()
        for name in ("SHARDQ_BROKER_URL", "SHARDQ_RELAY_URL")
        if name in values
    ]
    assert len(servers) == 10
    assert all(url.startswith("rediss://") for url in servers)
    for user in ("head-gpu-a", "tail"):
        assert found[user]["SHARDQ_WHEELS_URL"] == "https://queue.example.org:8443/wheels/"


def configuration(directory: Path, role: str) -> dict[str, str]:
    lines = (directory / role / "redis.conf").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines if not line.startswith("#"))


def test_servers_speak_tls_only_and_never_drop_a_job(directory: Path) -> None:
    queue, wire = configuration(directory, "queue"), configuration(directory, "wire")
    for found, port in ((queue, "6379"), (wire, "6380")):
        assert (found["port"], found["tls-port"]) == ("0", port)
        assert found["protected-mode"] == "yes"
        assert (found["maxmemory"], found["maxmemory-policy"]) == ("256mb", "noeviction")
        assert found["save"] == '""'
        assert "requirepass" not in found
    assert (queue["appendonly"], queue["appendfsync"]) == ("yes", "everysec")
    assert wire["appendonly"] == "no"


def test_the_certificate_is_good_for_every_name_and_nothing_else(directory: Path) -> None:
    certificate = x509.load_pem_x509_certificate((directory / "tls" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"queue.example.org", "localhost"}
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"198.51.100.7", "127.0.0.1", "::1"}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", str(directory / "ca" / "ca.crt")]
    result = subprocess.run(
        [*verify, str(directory / "tls" / "server.crt")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_key_that_could_sign_more_certificates_is_kept_nowhere(directory: Path) -> None:
    keys_found = [path for path in directory.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert keys_found == [directory / "tls" / "server.key"]


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    return Shardq(tmp_path / "data", {})


def test_nothing_is_overwritten(run: Shardq, directory: Path) -> None:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert "is not empty" in error_of(run("init-server", str(directory)))
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_an_empty_directory_is_filled_and_shut(run: Shardq, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir(mode=0o755)
    assert run("init-server", str(made), "--host", "h.example.org").exit_code == 0
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {path.name for path in made.iterdir()} == {"ca", "compose.env", "env", "queue", "tls", "web", "wire"}


def test_a_directory_that_is_not_ours_is_named_with_the_way_to_make_it_so(
    run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)  # whoever runs this may be root
    message = error_of(run("init-server", str(tmp_path / "theirs"), "--host", "h.example.org"))
    assert f"cannot write {tmp_path}/theirs: Permission denied" in message
    assert f'`sudo install -d -o "$USER" {tmp_path}/theirs`' in message


def test_what_fails_midway_leaves_nothing_and_can_be_done_again(
    run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path, contents: object) -> None:
        (directory / "half").mkdir(parents=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = tmp_path / "made"
    with monkeypatch.context() as patch:
        patch.setattr("cli.commands.init_server.write_files", fail)
        assert "No space left on device" in error_of(run("init-server", str(made), "--host", "h.example.org"))
    assert list(made.iterdir()) == []
    assert run("init-server", str(made), "--host", "h.example.org").exit_code == 0


def test_what_is_printed_says_what_to_copy_where_and_no_password(run: Shardq, tmp_path: Path) -> None:
    result = run("init-server", str(tmp_path / "s"), "--host", "h.example.org", "--tail", "gpu-b")
    assert result.exit_code == 0
    assert f"head head: {tmp_path}/s/env/head.env and ca/ca.crt" in result.stdout
    assert f"tail gpu-b: {tmp_path}/s/env/tail-gpu-b.env and ca/ca.crt" in result.stdout
    passwords = [urlsplit(v).password for _, vs in variables(tmp_path / "s") for v in vs.values() if "://" in v]
    assert not [password for password in passwords if str(password) in result.output]
    assert not list(tmp_path.glob(".s-*"))


def test_without_a_shared_database_submitting_is_for_the_host_and_elsewhere_goes_over_ssh(
    run: Shardq, tmp_path: Path
) -> None:
    result = run("init-server", str(tmp_path / "s"), "--host", "h.example.org")
    (line,) = [line for line in result.stdout.splitlines() if "client.env" in line]
    assert "on this host" in line
    assert "the user who runs the bookkeeper" in line
    assert "`ssh h.example.org shardq submit - < prompts.jsonl`" in result.stdout
    found = dict(variables(tmp_path / "s"))
    assert all("SHARDQ_DATABASE_URL" not in values for values in found.values())


def test_a_shared_database_is_written_for_bookkeeper_and_clients_and_clients_may_be_anywhere(
    run: Shardq, tmp_path: Path
) -> None:
    url = "postgresql://shardq:s3cret@db.example.org/jobs"
    result = run("init-server", str(tmp_path / "s"), "--host", "h.example.org", SHARDQ_DATABASE_URL=url)
    assert f"whoever submits, here or elsewhere, uses {tmp_path}/s/env/client.env" in result.stdout
    assert f"whoever submits: {tmp_path}/s/env/client.env and ca/ca.crt" in result.stdout
    assert "s3cret" not in result.output
    found = dict(variables(tmp_path / "s"))
    assert {user for user, values in found.items() if "SHARDQ_DATABASE_URL" in values} == {"bookkeeper", "client"}
    assert found["client"]["SHARDQ_DATABASE_URL"] == found["bookkeeper"]["SHARDQ_DATABASE_URL"] == url
    assert urlsplit(found["client"]["SHARDQ_BROKER_URL"]).hostname == "h.example.org"
    assert found["client"]["SHARDQ_TLS_CA"] == "/etc/shardq/ca.crt"
    assert urlsplit(found["bookkeeper"]["SHARDQ_BROKER_URL"]).hostname == "localhost"


def test_an_address_of_several_parameters_is_one_word_for_a_shell(run: Shardq, tmp_path: Path) -> None:
    url = "postgresql://db.example.org/jobs?sslmode=verify-full&sslrootcert=/etc/db.crt"
    assert run("init-server", str(tmp_path / "s"), "--host", "h", "--database", url).exit_code == 0
    script = f'set -a; . "{tmp_path}/s/env/client.env"; printf %s "$SHARDQ_DATABASE_URL"'
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == url


def test_an_sqlite_file_is_one_for_the_host_alone(run: Shardq, tmp_path: Path) -> None:
    url = "sqlite:////var/lib/shardq/shardq.sqlite3"
    result = run("init-server", str(tmp_path / "s"), "--host", "h.example.org", "--database", url)
    assert "over ssh" in result.stdout
    found = dict(variables(tmp_path / "s"))
    assert found["client"]["SHARDQ_DATABASE_URL"] == url
    assert urlsplit(found["client"]["SHARDQ_BROKER_URL"]).hostname == "localhost"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://shardq:s3cret@db.example.org/jobs",
        "mysql://db.example.org/s3cret",
        "sqlite:///s3cret.sqlite3",
        "postgresql://db.example.org/jobs?application_name=$(s3cret)",
        "postgresql://db.example.org/jobs\nSHARDQ_ALLOW_INSECURE=s3cret",
    ],
)
def test_a_database_that_cannot_be_shared_is_refused_without_repeating_its_address(
    run: Shardq, tmp_path: Path, url: str
) -> None:
    result = run("init-server", str(tmp_path / "s"), "--host", "h", "--database", url)
    assert error_of(result)
    assert "s3cret" not in result.output
    assert not (tmp_path / "s").exists()


def test_a_given_certificate_is_used_as_it_is(run: Shardq, directory: Path, tmp_path: Path) -> None:
    pair = ["--cert", str(directory / "tls" / "server.crt"), "--key", str(directory / "tls" / "server.key")]
    assert run("init-server", str(tmp_path / "public"), "--host", "queue.example.org", *pair).exit_code == 0
    found = dict(variables(tmp_path / "public"))
    assert all("SHARDQ_TLS_CA" not in values for values in found.values())
    # no promise that somebody's certificate is good for localhost
    assert urlsplit(found["bookkeeper"]["SHARDQ_BROKER_URL"]).hostname == "queue.example.org"
    private = [*pair, "--ca", str(directory / "ca" / "ca.crt")]
    assert run("init-server", str(tmp_path / "private"), "--host", "queue.example.org", *private).exit_code == 0
    assert (tmp_path / "private" / "ca" / "ca.crt").read_bytes() == (directory / "ca" / "ca.crt").read_bytes()
    assert (tmp_path / "private" / "tls" / "server.key").read_bytes() == (directory / "tls" / "server.key").read_bytes()


def test_a_certificate_without_its_key_is_refused(run: Shardq, directory: Path, tmp_path: Path) -> None:
    init_server(tmp_path / "other", "--host", "h")
    cert, key = str(directory / "tls" / "server.crt"), str(tmp_path / "other" / "tls" / "server.key")
    assert "no certificate and its key" in error_of(
        run("init-server", str(tmp_path / "s"), "--cert", cert, "--key", key)
    )
    assert "belong together" in error_of(run("init-server", str(tmp_path / "s"), "--cert", cert))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--head", "a*"],
        ["--head", "a b"],
        ["--head", "a=x y"],
        ["--head", "a="],
        ["--head", "a", "--head", "a=m"],
        ["--tail", "a:b"],
        ["--tail", "[a]"],
        ["--host", "a_b/c"],
        ["--host", "a\nSHARDQ_ALLOW_INSECURE=1"],
        ["--queue-memory", "lots"],
        ["--queue-memory", "1mb\nprotected-mode no"],
        ["--queue-port", "6380"],
        ["--ca-path", "ca.crt"],
        ["--ca-path", "/etc/ca.crt\nSHARDQ_ALLOW_INSECURE=1"],
    ],
)
def test_what_would_break_patterns_or_files_is_refused(run: Shardq, tmp_path: Path, options: list[str]) -> None:
    assert error_of(run("init-server", str(tmp_path / "s"), *options))
    assert not (tmp_path / "s").exists()


def test_a_head_has_the_keys_of_its_own_id_and_queue_only() -> None:
    rules = " ".join(queue_acl.for_head("gpu-a", "tiny"))
    patterns = re.findall(r"(?:%\w+)?~([^\s)]+)", rules)

    def allowed(key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    assert all(
        map(allowed, [*keys.ready("tiny"), keys.unacked("gpu-a"), keys.unacked_index("gpu-a"), keys.head("gpu-a")])
    )
    for other in (*keys.ready("tiny2"), *keys.ready("other"), keys.unacked("gpu-b"), keys.unacked("gpu-a2")):
        assert not allowed(other)
    assert not allowed(keys.head("gpu-a2"))
    assert not allowed(keys.BOOKKEEPER)


def test_no_account_may_do_what_administers_a_server() -> None:
    everybody = [
        *(queue_acl.for_head("a"), queue_acl.for_bookkeeper(), queue_acl.for_client(), queue_acl.for_flower()),
        *(wire_acl.for_head(), wire_acl.for_tail("a"), wire_acl.for_onlooker()),
    ]
    words = " ".join(rule for rules in everybody for rule in rules)
    granted = set(re.findall(r"\+(\S+)", words))
    assert not granted & {"config", "flushall", "flushdb", "keys", "acl", "debug", "shutdown", "module", "monitor"}
    assert {name for name in granted if name.startswith("@")} == {"@connection"}
    assert all(rules[:4] == ["+@connection", "-@admin", "-@dangerous", "-select"] for rules in everybody)


def test_only_the_bookkeeper_may_publish_control_commands() -> None:
    def publishes(rules: list[str]) -> bool:
        return any("+publish" in rule and f"&{queue_acl.CONTROL}" in rule for rule in rules)

    assert publishes(queue_acl.for_bookkeeper())
    for rules in (queue_acl.for_head("a"), queue_acl.for_client(), queue_acl.for_flower()):
        assert not publishes(rules)


COMPOSE = (Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8")


def test_compose_asks_for_nothing_that_init_server_does_not_write(directory: Path) -> None:
    lines = (directory / "compose.env").read_text().splitlines()
    written = {line.partition("=")[0] for line in lines if not line.startswith("#")}
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE))
    # the profiles are compose's own to read; the other machines' directory has a default
    assert asked - {"SHARDQ_WORKER_DIR"} == written - {"COMPOSE_PROFILES"}
    for path in re.findall(r"\$\{SHARDQ_SERVER_DIR:\?\}/([\w./-]+)", COMPOSE):
        assert (directory / path).exists(), path


def test_compose_holds_no_password_and_opens_no_port_of_its_own(directory: Path) -> None:
    services = yaml.safe_load(COMPOSE)["services"]
    assert set(services) == {"queue", "wire", "bookkeeper", "flower", "web", "client", "head", "tail"}
    assert all("ports" not in service for service in services.values())
    assert "PASSWORD" not in COMPOSE.upper().replace("HAS NO PASSWORD", "").replace("AND PASSWORD", "").replace(
        "WEB/PASSWORD", ""
    )
    for name in ("queue", "wire"):
        assert services[name]["command"] == ["valkey-server", "redis.conf"]
        # the configuration's `../../tls` from its data directory
        assert services[name]["working_dir"] == f"/srv/shardq/{name}"
        assert any(mount.endswith(":/srv/shardq/tls:ro") for mount in services[name]["volumes"])


def test_an_address_as_host_is_no_name_for_compose_to_map(run: Shardq, tmp_path: Path) -> None:
    assert run("init-server", str(tmp_path / "s"), "--host", "2001:db8::1").exit_code == 0
    assert "SHARDQ_HOST=localhost\n" in (tmp_path / "s" / "compose.env").read_text()
    found = dict(variables(tmp_path / "s"))
    assert "@[2001:db8::1]:6379/0" in found["head"]["SHARDQ_BROKER_URL"]
