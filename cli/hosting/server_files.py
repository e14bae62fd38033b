"""The files of a public host's two Redis servers: configuration, accounts, certificates, variables per role."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.hosting.certificates import Certificates
from cli.hosting.web_proxy import nginx_conf, password_line
from relay import acl as wire_acl
from tasks import acl as queue_acl

#: bytes of a generated password
PASSWORD_BYTES = 32
#: where `docker-compose.yml` shows the authority's certificate to its containers
CONTAINER_CA = "/etc/shardq/ca.crt"


@dataclass(frozen=True, slots=True)
class HeadName:
    """A head's id and the one served name it may take jobs of; None: any."""

    head_id: str
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What was asked for."""

    #: where the files will be
    directory: Path
    #: how heads and tails reach the servers, and how processes on the host itself do
    host: str
    local_host: str
    queue_port: int
    wire_port: int
    #: of Flower and the metrics, behind a password
    web_port: int
    #: as Redis writes sizes: `256mb`
    queue_memory: str
    wire_memory: str
    heads: tuple[HeadName, ...]
    tails: tuple[str, ...]
    #: where ca.crt will lie on the machines of heads and tails
    remote_ca: str
    #: of bookkeeper and clients; None: a file that only the bookkeeper's user has
    database_url: str | None
    certificates: Certificates

    @property
    def host_is_name(self) -> bool:
        """False: it is an address."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return False

    @property
    def has_remote_clients(self) -> bool:
        """Whether the database can be reached from elsewhere, too."""
        return self.database_url is not None and not self.database_url.startswith("sqlite")

    @property
    def has_ca(self) -> bool:
        """False: the certificate is signed by an authority that every machine knows."""
        return self.certificates.authority is not None


@dataclass(frozen=True, slots=True)
class Account:
    """Who may log in to one server, with a password of its own."""

    user: str
    rules: tuple[str, ...]
    password: str

    @classmethod
    def new(cls, user: str, rules: Sequence[str]) -> Account:
        """With a new random password."""
        return cls(user, tuple(rules), secrets.token_urlsafe(PASSWORD_BYTES))

    def line(self) -> str:
        """In an ACL file: the password's hash only. It is random, so nobody can guess back from the hash."""
        return wire_acl.user(self.user, hashlib.sha256(self.password.encode()).hexdigest(), self.rules)


@dataclass(frozen=True, slots=True)
class File:
    """A file to be written, and who may read it."""

    name: str
    content: bytes
    mode: int = 0o600


def files(plan: ServerPlan) -> Iterator[File]:
    """Everything that `init-server` writes, below the directory it was given."""
    queue, wire = _queue_accounts(plan), _wire_accounts(plan)
    yield _text("queue/redis.conf", _redis_conf(plan.queue_port, plan.queue_memory, persistent=True), 0o644)
    yield _text("wire/redis.conf", _redis_conf(plan.wire_port, plan.wire_memory, persistent=False), 0o644)
    yield _text("queue/users.acl", _acl_file(queue))
    yield _text("wire/users.acl", _acl_file(wire))
    yield File("tls/server.crt", plan.certificates.certificate, 0o644)
    yield File("tls/server.key", plan.certificates.key)
    if plan.certificates.authority is not None:
        yield File("ca/ca.crt", plan.certificates.authority, 0o644)
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    nginx = nginx_conf(plan.web_port, ipv6=":" in plan.host, of_root=os.getuid() == 0)
    yield _text("web/nginx.conf", nginx, 0o644)
    yield _text("web/users", [password_line(password)])
    yield _text("web/password", [password])
    yield _text("compose.env", _compose_variables(plan), 0o644)
    for user in dict.fromkeys([*queue, *wire]):
        yield _text(f"env/{user}.env", _variables(plan, user, queue.get(user), wire.get(user)))


def directories() -> tuple[str, ...]:
    """All of them, outer ones first."""
    return ("queue", "queue/data", "wire", "wire/data", "tls", "ca", "env", "web")


def head_user(head_id: str) -> str:
    """The account of a head."""
    return "head" if head_id == "head" else f"head-{head_id}"


def tail_user(name: str) -> str:
    """The account of the tails of one name."""
    return "tail" if name == "tail" else f"tail-{name}"


def _queue_accounts(plan: ServerPlan) -> dict[str, Account]:
    accounts = [
        Account.new("bookkeeper", queue_acl.for_bookkeeper()),
        Account.new("client", queue_acl.for_client()),
        Account.new("flower", queue_acl.for_flower()),
        *(Account.new(head_user(head.head_id), queue_acl.for_head(head.head_id, head.model)) for head in plan.heads),
    ]
    return {account.user: account for account in accounts}


def _wire_accounts(plan: ServerPlan) -> dict[str, Account]:
    accounts = [
        Account.new("bookkeeper", wire_acl.for_onlooker()),
        Account.new("client", wire_acl.for_onlooker()),
        *(Account.new(head_user(head.head_id), wire_acl.for_head()) for head in plan.heads),
        *(Account.new(tail_user(name), wire_acl.for_tail(name)) for name in plan.tails),
    ]
    return {account.user: account for account in accounts}


def _acl_file(accounts: dict[str, Account]) -> list[str]:
    return [wire_acl.NOBODY, *(account.line() for account in accounts.values())]


def _redis_conf(port: int, memory: str, *, persistent: bool) -> list[str]:
    """For Redis from 7.0 and Valkey. Paths are relative to `dir`, that one to where the server is started."""
    return [
        f"# Start it in this file's own directory: cd {'queue' if persistent else 'wire'} && valkey-server redis.conf",
        "bind * -::*",
        "protected-mode yes",
        "port 0",
        f"tls-port {port}",
        "tls-cert-file ../../tls/server.crt",
        "tls-key-file ../../tls/server.key",
        "tls-auth-clients no",
        'tls-protocols "TLSv1.2 TLSv1.3"',
        "tcp-keepalive 60",
        "maxclients 1000",
        "aclfile ../users.acl",
        "acl-pubsub-default resetchannels",
        "enable-protected-configs no",
        "enable-debug-command no",
        "enable-module-command no",
        "# a full server refuses writes; it never drops a job",
        f"maxmemory {memory}",
        "maxmemory-policy noeviction",
        "# no value is larger than the largest frame",
        "proto-max-bulk-len 80mb",
        'save ""',
        "# every write is on the disk within a second" if persistent else "# nothing here is worth a disk",
        f"appendonly {'yes' if persistent else 'no'}",
        "appendfsync everysec",
        "dir data",
        "daemonize no",
    ]


def _variables(plan: ServerPlan, user: str, queue: Account | None, wire: Account | None) -> list[str]:
    """What a process of this account is started with."""
    is_remote = user.startswith(("head", "tail")) or (user == "client" and plan.has_remote_clients)
    local_ca = str(plan.directory / "ca" / "ca.crt")
    host, ca = (plan.host, plan.remote_ca) if is_remote else (plan.local_host, local_ca)
    lines = [f"# For `shardq` as {user}. It holds passwords: keep it to its user (mode 0600)."]
    if queue is not None:
        lines.append(f"SHARDQ_BROKER_URL={_url(queue, host, plan.queue_port)}")
    if wire is not None:
        lines.append(f"SHARDQ_RELAY_URL={_url(wire, host, plan.wire_port)}")
    if plan.has_ca:
        lines.append(f"SHARDQ_TLS_CA={ca}")
    if plan.database_url is not None and user in ("bookkeeper", "client"):
        lines.append(f"SHARDQ_DATABASE_URL={_quoted(plan.database_url)}")
    for head in plan.heads:
        if user == head_user(head.head_id):
            lines.append(f"SHARDQ_HEAD_ID={head.head_id}")
            lines += [f"SHARDQ_NAME={head.model}"] if head.model is not None else []
    lines += [f"SHARDQ_TAIL_NAME={name}" for name in plan.tails if user == tail_user(name)]
    return lines


def _quoted(url: str) -> str:
    """Between several parameters stands what a shell would read otherwise."""
    return f"'{url}'" if "&" in url else url


def _url(account: Account, host: str, port: int) -> str:
    place = f"[{host}]" if ":" in host else host
    return f"rediss://{account.user}:{account.password}@{place}:{port}/0"


def _compose_variables(plan: ServerPlan) -> list[str]:
    return [
        "# docker compose --env-file compose.env up -d",
        "COMPOSE_PROFILES=server",
        f"SHARDQ_SERVER_DIR={plan.directory}",
        f"SHARDQ_HOST={plan.host if plan.host_is_name else 'localhost'}",
        f"SHARDQ_UID={os.getuid()}",
        f"SHARDQ_GID={os.getgid()}",
        *(f"SHARDQ_{name}_PORT={port}" for name, port in _ports(plan)),
        f"SHARDQ_QUEUE_LIMIT={_limit_mb(plan.queue_memory)}m",
        f"SHARDQ_WIRE_LIMIT={_limit_mb(plan.wire_memory)}m",
        f"SHARDQ_CONTAINER_CA={CONTAINER_CA if plan.has_ca else ''}",
    ]


def _ports(plan: ServerPlan) -> tuple[tuple[str, int], ...]:
    return ("QUEUE", plan.queue_port), ("WIRE", plan.wire_port), ("WEB", plan.web_port)


def _limit_mb(memory: str) -> int:
    """MiB that a container with a server of so much data may take: half as much again while it rewrites its file."""
    mebibytes = int(memory[:-2]) * {"kb": 1 / 1024, "mb": 1, "gb": 1024}[memory[-2:]]
    return int(1.5 * mebibytes) + 64


def _text(name: str, lines: Sequence[str], mode: int = 0o600) -> File:
    return File(name, "".join(f"{line}\n" for line in lines).encode(), mode)


def write_files(directory: Path, contents: Sequence[File]) -> None:
    """Write into a new directory. Raises OSError."""
    directory.mkdir(mode=0o700)
    for name in directories():
        (directory / name).mkdir(mode=0o700)
    # readable by everybody who can get there, which is decided by the directory above
    (directory / "ca").chmod(0o755)
    for file in contents:
        path = directory / file.name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.content)
