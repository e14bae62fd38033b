"""`docker-compose.yml`, `Dockerfile` and the units: what they name exists, what they start parses."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]

from cli.hosting.web_proxy import FLOWER_PORT, METRICS_PORT, WEB_USER, WHEELS_PATH
from tests.documents import ROOT, check_words
from tests.secured_servers import init_server

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("host") / "server"
    init_server(directory, "--host", "queue.example.org", "--queue-memory", "200mb", "--web-port", "9443")
    return directory


@pytest.mark.parametrize("name", ["bookkeeper", "flower", "client", "head", "tail"])
def test_what_a_container_starts_is_a_command_line_of_shardq(name: str) -> None:
    words = [*SERVICES[name].get("entrypoint", []), *SERVICES[name]["command"]]
    assert words[0] == "shardq"
    check_words(words[1:])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_what_a_unit_starts_is_a_command_line_of_shardq_and_it_is_hardened(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    (start,) = re.findall("^ExecStart=(.+)$", text, flags=re.MULTILINE)
    program, *words = shlex.split(start)
    if Path(program).name == "shardq":
        check_words(words)
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes", "User=shardq"):
        assert f"\n{line}\n" in text


def test_a_command_line_with_an_option_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(click.ClickException):
        check_words(["bookkeeper", "--metrics-prot", "9464"])


def test_what_the_images_copy_is_there_and_every_package_is_copied() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)
    sources = {source for words in copied for source in words.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    assert {"cli", "relay", "shardq", "storage", "tasks", "workers", "pyproject.toml", "constraints.txt"} <= sources
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE))
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} <= stages
    assert set(re.findall(r"--from=(\S+)", DOCKERFILE)) <= stages


def test_the_server_is_a_profile_that_its_variables_choose_and_gpus_are_for_head_and_tail_only(server: Path) -> None:
    assert "COMPOSE_PROFILES=server\n" in (server / "compose.env").read_text()
    profiles = {name: service["profiles"] for name, service in SERVICES.items()}
    ours = {name for name, chosen in profiles.items() if chosen == ["server"]}
    assert ours == {"queue", "wire", "bookkeeper", "flower", "web"}
    assert {name for name, service in SERVICES.items() if "deploy" in service} == {"head", "tail"}
    for name in ours:
        assert "healthcheck" in SERVICES[name], name
        assert "mem_limit" in SERVICES[name], name


def test_shardq_of_the_host_runs_the_client_container_from_wherever_it_is_linked(tmp_path: Path) -> None:
    docker, link = tmp_path / "docker", tmp_path / "bin" / "shardq"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; cat\n')
    docker.chmod(0o755)
    link.parent.mkdir()
    link.symlink_to(ROOT / "deploy" / "shardq")
    done = subprocess.run(
        [link, "submit", "-", "--name", "two words"],
        input="a line",
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    compose = ["compose", "--file", str(ROOT / "docker-compose.yml"), "--env-file", "/srv/shardq/compose.env"]
    run = ["run", "--rm", "--quiet-pull", "--no-TTY", "client"]
    assert done.stdout.splitlines() == [*compose, *run, "submit", "-", "--name", "two words", "a line"]
    assert SERVICES["client"]["entrypoint"] == ["shardq"]


def test_a_redis_container_may_take_more_than_its_server_by_what_rewriting_needs(server: Path) -> None:
    assert "SHARDQ_QUEUE_LIMIT=364m\n" in (server / "compose.env").read_text()


def test_the_proxy_asks_for_the_password_that_was_made_and_goes_where_the_pages_are(server: Path) -> None:
    conf = (server / "web" / "nginx.conf").read_text()
    assert "listen 9443 ssl;" in conf
    assert conf.count("{") == conf.count("}")
    # for every `location` but that of the wheel
    assert conf.index('auth_basic "shardq"') < conf.index("location")
    assert re.findall(r"location (\S+ )?(\S+) \{ auth_basic off;", conf) == [("", WHEELS_PATH)]
    assert conf.count("auth_basic ") == 2
    ports = {int(port) for port in re.findall(r"proxy_pass http://127\.0\.0\.1:(\d+);", conf)}
    assert ports == {FLOWER_PORT, METRICS_PORT}
    assert str(METRICS_PORT) in SERVICES["bookkeeper"]["command"]
    assert str(FLOWER_PORT) in SERVICES["flower"]["command"]
    for path in re.findall(r"ssl_certificate(?:_key)? (\S+);", conf):
        assert (server / "web" / path).resolve().is_file()

    user, _, stored = (server / "web" / "users").read_text().strip().partition(":{SSHA}")
    digest = base64.b64decode(stored)
    password = (server / "web" / "password").read_text().strip().encode()
    assert user == WEB_USER
    assert hashlib.sha1(password + digest[20:]).digest() == digest[:20]
    assert len(password) >= 43


def compose() -> list[str] | None:
    """How compose is called here: as a plugin, or as a program of its own."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return None


@pytest.mark.parametrize("profile", ["server", "client", "head", "tail"])
def test_compose_accepts_the_file_and_each_profile_alone(server: Path, profile: str) -> None:
    command = compose()
    if command is None:
        pytest.skip("no docker compose here")
    environment = {**os.environ, "SHARDQ_WORKER_DIR": str(server / "env")}
    argv = [*command, "--env-file", str(server / "compose.env"), "--profile", profile, "config"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    wanted = {name for name, service in SERVICES.items() if service["profiles"] == [profile]}
    assert wanted <= set(services)
    if profile == "server":
        assert services["queue"]["mem_limit"]
