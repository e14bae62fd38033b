"""`shardq server`: one account of a public host changes, and nobody else has to move."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.errors import CliError
from cli.hosting.web_proxy import wheel_directory
from cli.hosting.wheel import pack
from tests.cli_runner import Shardq, error_of
from tests.documents import ROOT
from tests.secured_servers import init_server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("host") / "server"
    init_server(
        directory, "--host", "queue.example.org", "--head", "gpu-a=tiny", "--tail", "gpu-b", "--web-port", "9443"
    )
    return directory


@pytest.fixture
def host(made: Path, tmp_path: Path) -> Path:
    """A copy, as the command made it."""
    return Path(shutil.copytree(made, tmp_path / "server"))


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    return Shardq(tmp_path / "data", {})


def variables(host: Path, user: str) -> dict[str, str]:
    lines = (host / "env" / f"{user}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def line_of(host: Path, server: str, user: str) -> str:
    (line,) = [line for line in (host / server / "users.acl").read_text().splitlines() if f"user {user} " in line]
    return line


def opens(host: Path, user: str) -> bool:
    """Whether the passwords of an account's env file are those that its servers know."""
    urls = {"queue": "SHARDQ_BROKER_URL", "wire": "SHARDQ_RELAY_URL"}
    known = variables(host, user)
    digests = {
        server: hashlib.sha256((urlsplit(known[name]).password or "").encode()).hexdigest()
        for server, name in urls.items()
        if name in known
    }
    return all(f" on #{digest} " in line_of(host, server, user) for server, digest in digests.items())


def others(host: Path, *changed: str) -> dict[str, str]:
    """Every env file and account line but those of the accounts that change."""
    found = {path.stem: path.read_text() for path in (host / "env").iterdir()}
    for server in ("queue", "wire"):
        for line in (host / server / "users.acl").read_text().splitlines():
            found[f"{server} {line.split()[1]}"] = line
    return {name: text for name, text in found.items() if name.split()[-1] not in changed}


def test_further_heads_and_tails_get_accounts_as_the_first_ones_have(host: Path, run: Shardq, tmp_path: Path) -> None:
    before = others(host)
    done = run("server", "add", str(host), "--head", "gpu-c=other", "--tail", "gpu-d")
    assert done.exit_code == 0, done.stderr
    assert "compose.env restart queue wire`" in done.stderr
    assert others(host, "head-gpu-c", "tail-gpu-d") == before
    # the very files that they would have had from the beginning, passwords apart
    all_at_once = tmp_path / "all"
    init_server(
        all_at_once,
        *("--host", "queue.example.org", "--head", "gpu-a=tiny", "--head", "gpu-c=other"),
        *("--tail", "gpu-b", "--tail", "gpu-d", "--web-port", "9443"),
    )
    for user in ("head-gpu-c", "tail-gpu-d"):
        assert opens(host, user)
        path = host / "env" / f"{user}.env"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        hidden = [re.sub(r":[^:@]+@", ":@", (place / "env" / path.name).read_text()) for place in (host, all_at_once)]
        assert hidden[0] == hidden[1]
        rights = [re.sub(r"#\w+", "#", line_of(place, "wire", user)) for place in (host, all_at_once)]
        assert rights[0] == rights[1]


def test_a_name_that_is_taken_gets_no_second_account(host: Path, run: Shardq) -> None:
    before = others(host)
    assert "account head-gpu-a already" in error_of(run("server", "add", str(host), "--head", "gpu-a"))
    assert "expected ID or ID=MODEL" in error_of(run("server", "add", str(host), "--head", "a b"))
    assert "with --head or --tail" in error_of(run("server", "add", str(host)))
    assert others(host) == before


@pytest.mark.parametrize("user", ["head-gpu-a", "tail-gpu-b", "client", "flower"])
def test_an_account_gets_new_passwords_and_keeps_everything_else(host: Path, run: Shardq, user: str) -> None:
    before, env = others(host, user), variables(host, user)
    done = run("server", "rotate", str(host), user)
    assert done.exit_code == 0, done.stderr
    assert opens(host, user)
    assert others(host, user) == before
    fresh = variables(host, user)
    assert fresh.keys() == env.keys()
    for name in env:
        old, new = urlsplit(env[name]), urlsplit(fresh[name])
        assert (old.username, old.hostname, old.path) == (new.username, new.hostname, new.path)
        assert (old.password != new.password) == (old.scheme == "rediss")
    assert ("begins anew" in done.stderr) == (user in ("client", "flower"))


@pytest.mark.parametrize("command", ["rotate", "revoke"])
def test_one_unknown_account_among_several_leaves_all_as_they_were(host: Path, run: Shardq, command: str) -> None:
    before = others(host)
    assert "no account 'head-gpu-z'" in error_of(run("server", command, str(host), "tail-gpu-b", "head-gpu-z"))
    assert others(host) == before


def test_a_revoked_account_is_gone_and_nobody_else(host: Path, run: Shardq) -> None:
    assert run("server", "add", str(host), "--tail", "gpu-d").exit_code == 0
    before = others(host, "tail-gpu-b")
    assert run("server", "revoke", str(host), "tail-gpu-b").exit_code == 0
    assert others(host) == before
    assert "tail-gpu-b" not in (host / "wire" / "users.acl").read_text()


def test_what_the_host_cannot_do_without_is_not_revoked(host: Path, run: Shardq) -> None:
    assert "the host itself works as client" in error_of(run("server", "revoke", str(host), "client"))
    assert "no account 'gpu-a': there are bookkeeper" in error_of(run("server", "revoke", str(host), "gpu-a"))
    assert run("server", "revoke", str(host), "tail-gpu-b").exit_code == 0
    assert "the last account of another machine" in error_of(run("server", "revoke", str(host), "head-gpu-a"))
    assert run("server", "add", str(host), "--head", "gpu-c").exit_code == 0
    assert run("server", "revoke", str(host), "head-gpu-a").exit_code == 0


def test_an_update_gives_accounts_the_rights_of_this_version_and_keeps_what_others_wrote(
    host: Path, run: Shardq
) -> None:
    complete = others(host)
    for server in ("queue", "wire"):
        path = host / server / "users.acl"
        path.write_text(path.read_text().replace("+get", "") + "user admin on >secret ~* +@all\n")
    (host / "web" / "nginx.conf").write_text("events {}\n")
    done = run("server", "update", str(host))
    assert done.exit_code == 0, done.stderr
    assert "rights changed: " in done.stdout
    assert "proxy: changed" in done.stdout
    now = others(host)
    assert now.pop("queue admin") == now.pop("wire admin") == "user admin on >secret ~* +@all"
    assert now == complete
    again = run("server", "update", str(host))
    assert ("rights changed: none" in again.stdout, "proxy: as it was" in again.stdout) == (True, True)


def test_a_directory_that_init_server_did_not_make_is_named(run: Shardq, tmp_path: Path) -> None:
    for command in (["accounts"], ["update"], ["rotate", "head"]):
        name, *arguments = command
        assert "that `shardq init-server` made" in error_of(run("server", name, str(tmp_path), *arguments))


def test_a_failed_write_leaves_the_file_as_it_was(host: Path, run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    before = others(host)
    monkeypatch.setattr("cli.hosting.accounts.os.fdopen", full)
    assert "No space left on device" in error_of(run("server", "rotate", str(host), "head-gpu-a"))
    assert others(host) == before
    assert list(host.rglob(".new-*")) == []


# -- the wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a clone builds."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def test_an_installation_is_packed_into_the_wheel_that_it_came_from(built: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(built)]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    (info,) = site.glob("shardq-*.dist-info")
    name, content = pack(Distribution.at(info))
    assert name == built.name
    (tmp_path / name).write_bytes(content)
    packed, original = zipfile.ZipFile(tmp_path / name), zipfile.ZipFile(built)
    assert packed.testzip() is None
    assert set(packed.namelist()) == set(original.namelist())
    record = f"{info.name}/RECORD"
    for member in set(original.namelist()) - {record}:
        assert packed.read(member) == original.read(member), member
    assert sorted(packed.read(record).split()) == sorted(original.read(record).split())
    assert pack(Distribution.at(info)) == (name, content)


def test_a_link_to_a_clone_has_no_wheel_of_its_own_but_one_that_lies_there_is_kept(host: Path, run: Shardq) -> None:
    with pytest.raises(CliError, match="runs from a clone"):
        pack()
    assert "wheel: none, this shardq runs from a clone" in run("server", "update", str(host)).stdout
    lying = wheel_directory(host) / "shardq-0.1.0-py3-none-any.whl"
    lying.write_bytes(b"a wheel")
    assert f"wheel: {lying}" in run("server", "update", str(host)).stdout
    assert lying.read_bytes() == b"a wheel"
