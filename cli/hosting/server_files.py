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
from cli.hosting.web_proxy import WHEELS_PATH, nginx_conf, password_line
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

    @property
    def user(self) -> str:
        """Its account."""
        return "head" if self.head_id == "head" else f"head-{self.head_id}"

    def queue_rules(self) -> list[str]:
        """What it may do on the queue server."""
        return queue_acl.for_head(self.head_id, self.model)

    def wire_rules(self) -> list[str]:
        """What it may do on the wire server."""
        return wire_acl.for_head()

    def variables(self, reach: Reach) -> list[str]:
        """What it is told beside the addresses."""
        name = [f"SHARDQ_NAME={self.model}"] if self.model is not None else []
        return [f"SHARDQ_HEAD_ID={self.head_id}", *name, _wheels(reach)]


@dataclass(frozen=True, slots=True)
class TailName:
    """The name that tails of one account have."""

    name: str

    @property
    def user(self) -> str:
        """Its account; on the wire server only."""
        return "tail" if self.name == "tail" else f"tail-{self.name}"

    def wire_rules(self) -> list[str]:
        """What it may do on the wire server."""
        return wire_acl.for_tail(self.name)

    def variables(self, reach: Reach) -> list[str]:
        """What it is told beside the addresses."""
        return [f"SHARDQ_TAIL_NAME={self.name}", _wheels(reach)]


@dataclass(frozen=True, slots=True)
class Reach:
    """How the processes of one machine find the servers."""

    host: str
    queue_port: int
    wire_port: int
    web_port: int
    #: where ca.crt lies there; None: the certificate is signed by an authority that every machine knows
    ca: str | None

    @property
    def place(self) -> str:
        """The host as addresses have it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def url(self, account: Account, port: int) -> str:
        """An account's address of the server at one of the ports."""
        return f"rediss://{account.user}:{account.password}@{self.place}:{port}/0"


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
    tails: tuple[TailName, ...]
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
    def here(self) -> Reach:
        """For processes on the host itself."""
        return self._reach(self.local_host, str(self.directory / "ca" / "ca.crt"))

    @property
    def elsewhere(self) -> Reach:
        """For heads, tails, and whoever submits from other machines."""
        return self._reach(self.host, self.remote_ca)

    def _reach(self, host: str, ca: str) -> Reach:
        return Reach(host, self.queue_port, self.wire_port, self.web_port, ca if self.has_ca else None)

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
    for user in ("bookkeeper", "client", "flower"):
        reach = plan.elsewhere if user == "client" and plan.has_remote_clients else plan.here
        database = () if plan.database_url is None or user == "flower" else (_database(plan.database_url),)
        yield env_file(user, reach, queue.get(user), wire.get(user), database)
    for head in plan.heads:
        yield env_file(head.user, plan.elsewhere, queue[head.user], wire[head.user], head.variables(plan.elsewhere))
    for tail in plan.tails:
        yield env_file(tail.user, plan.elsewhere, None, wire[tail.user], tail.variables(plan.elsewhere))


def directories() -> tuple[str, ...]:
    """All of them, outer ones first."""
    return ("queue", "queue/data", "wire", "wire/data", "tls", "ca", "env", "web", "web/wheels")


def _queue_accounts(plan: ServerPlan) -> dict[str, Account]:
    accounts = [
        Account.new("bookkeeper", queue_acl.for_bookkeeper()),
        Account.new("client", queue_acl.for_client()),
        Account.new("flower", queue_acl.for_flower()),
        *(Account.new(head.user, head.queue_rules()) for head in plan.heads),
    ]
    return {account.user: account for account in accounts}


def _wire_accounts(plan: ServerPlan) -> dict[str, Account]:
    accounts = [
        Account.new("bookkeeper", wire_acl.for_onlooker()),
        Account.new("client", wire_acl.for_onlooker()),
        *(Account.new(head.user, head.wire_rules()) for head in plan.heads),
        *(Account.new(tail.user, tail.wire_rules()) for tail in plan.tails),
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


def env_file(user: str, reach: Reach, queue: Account | None, wire: Account | None, others: Sequence[str] = ()) -> File:
    """What a process of this account is started with."""
    lines = [f"# For `shardq` as {user}. It holds passwords: keep it to its user (mode 0600)."]
    if queue is not None:
        lines.append(f"SHARDQ_BROKER_URL={reach.url(queue, reach.queue_port)}")
    if wire is not None:
        lines.append(f"SHARDQ_RELAY_URL={reach.url(wire, reach.wire_port)}")
    if reach.ca is not None:
        lines.append(f"SHARDQ_TLS_CA={reach.ca}")
    return _text(f"env/{user}.env", [*lines, *others])


def _database(url: str) -> str:
    # between several parameters stands what a shell would read otherwise
    return f"SHARDQ_DATABASE_URL='{url}'" if "&" in url else f"SHARDQ_DATABASE_URL={url}"


def _wheels(reach: Reach) -> str:
    """Where a notebook fetches the shardq that the host runs; anybody may."""
    return f"SHARDQ_WHEELS_URL=https://{reach.place}:{reach.web_port}{WHEELS_PATH}"


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
