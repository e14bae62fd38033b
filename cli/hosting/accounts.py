"""Changing a directory that `init-server` has filled: one account at a time, so that no other machine need be touched.

The accounts are the lines of the two `users.acl`, and what is known of a machine stands in its env file. Servers read
their accounts when they start.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from cli.errors import CliError, NotFound
from cli.hosting.server_files import Account, HeadName, Reach, TailName, env_file
from cli.hosting.web_proxy import nginx_conf
from relay import acl as wire_acl
from tasks import acl as queue_acl

SERVERS = ("queue", "wire")
#: accounts of processes on the host itself
OF_THE_HOST = ("bookkeeper", "client", "flower")
_LINE = re.compile(r"user (?P<user>\S+) on #(?P<digest>[0-9a-f]{64}) .*")
_PASSWORD = re.compile(r"(?P<before>^SHARDQ_(?:BROKER|RELAY)_URL=rediss://[^:]+:)[^@]+(?P<after>@.*)$")
_WEB_PORT = re.compile(r"^SHARDQ_WEB_PORT=(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AccountFile:
    """The lines of one server's `users.acl`; those that we did not write stay as they are."""

    path: Path
    lines: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> AccountFile:
        """Raises OSError."""
        return cls(path, tuple(path.read_text(encoding="utf-8").splitlines()))

    def digests(self) -> dict[str, str]:
        """SHA-256 of the password by account."""
        found = (_LINE.fullmatch(line) for line in self.lines)
        return {match["user"]: match["digest"] for match in found if match}

    def with_line(self, user: str, line: str) -> AccountFile:
        """With this line in place of the account's, or at the end."""
        if user not in self.digests():
            return replace(self, lines=(*self.lines, line))
        return replace(self, lines=tuple(line if _is_of(user, old) else old for old in self.lines))

    def without(self, user: str) -> AccountFile:
        """Without the account."""
        return replace(self, lines=tuple(line for line in self.lines if not _is_of(user, line)))

    def write(self) -> None:
        """Raises OSError; then the file is as it was."""
        write_whole(self.path, _text(self.lines))


def _is_of(user: str, line: str) -> bool:
    return line.startswith(f"user {user} ")


@dataclass(frozen=True, slots=True)
class ServerDirectory:
    """The directory, and both servers' accounts."""

    path: Path
    queue: AccountFile
    wire: AccountFile

    @classmethod
    def open(cls, path: Path) -> ServerDirectory:
        """Raises CliError for a directory that `init-server` has not filled."""
        try:
            queue, wire = (AccountFile.read(path / server / "users.acl") for server in SERVERS)
        except OSError as error:
            raise CliError(
                f"{error.filename}: {error.strerror}: expected a directory that `shardq init-server` made"
            ) from error
        return cls(path, queue, wire)

    def accounts(self) -> dict[str, tuple[str, ...]]:
        """The servers that each account may use, by account."""
        known = {"queue": self.queue.digests(), "wire": self.wire.digests()}
        users = dict.fromkeys([*known["queue"], *known["wire"]])
        return {user: tuple(server for server in SERVERS if user in known[server]) for user in users}

    def add(self, name: HeadName | TailName) -> Path:
        """Make an account; its env file. Raises CliError if there is one of that name."""
        if name.user in self.accounts():
            raise CliError(f"there is an account {name.user} already: `shardq server rotate` gives it new passwords")
        reach = self._elsewhere()
        wire = Account.new(name.user, name.wire_rules())
        queue = Account.new(name.user, name.queue_rules()) if isinstance(name, HeadName) else None
        file = env_file(name.user, reach, queue, wire, name.variables(reach))
        write_whole(self.path / file.name, file.content)
        self._put(queue, wire)
        return self.path / file.name

    def rotate(self, user: str) -> Path:
        """New passwords for an account; its env file. Raises NotFound."""
        servers = self.servers_of(user)
        path = self.path / "env" / f"{user}.env"
        fresh = {server: Account.new(user, self._rules(user, server)) for server in servers}
        queue, wire = fresh.get("queue"), fresh.get("wire")
        lines = path.read_text(encoding="utf-8").splitlines()
        write_whole(path, _text([_with_password(line, queue, wire) for line in lines]))
        self._put(queue, wire)
        return path

    def revoke(self, user: str) -> None:
        """Remove an account and its env file. Raises NotFound, or CliError for one that cannot be done without."""
        self.servers_of(user)
        if user in OF_THE_HOST:
            raise CliError(f"the host itself works as {user}: `shardq server rotate` gives it new passwords")
        if [*self._remote()] == [user]:
            raise CliError(
                f"{user} is the last account of another machine: add the one that takes its place first, or "
                "`shardq server rotate` it"
            )
        self.queue.without(user).write()
        self.wire.without(user).write()
        (self.path / "env" / f"{user}.env").unlink(missing_ok=True)

    def renew_rights(self) -> list[str]:
        """Give every account the rights that this version knows; passwords stay. The accounts that changed."""
        changed = []
        for server, file in (("queue", self.queue), ("wire", self.wire)):
            renewed = file
            for user, digest in file.digests().items():
                before = renewed
                renewed = before.with_line(user, wire_acl.user(user, digest, self._rules(user, server)))
                changed += [user] if renewed != before else []
            if renewed != file:
                renewed.write()
        return list(dict.fromkeys(changed))

    def renew_proxy(self) -> bool:
        """Write the proxy's configuration anew; whether that changed anything."""
        path, reach = self.path / "web" / "nginx.conf", self._elsewhere()
        lines = nginx_conf(reach.web_port, ipv6=":" in reach.host, of_root=self.path.stat().st_uid == 0)
        if path.read_text(encoding="utf-8").splitlines() == lines:
            return False
        write_whole(path, _text(lines), 0o644)
        return True

    def _put(self, queue: Account | None, wire: Account | None) -> None:
        if queue is not None:
            self.queue.with_line(queue.user, queue.line()).write()
        if wire is not None:
            self.wire.with_line(wire.user, wire.line()).write()

    def servers_of(self, user: str) -> tuple[str, ...]:
        """The servers that an account may use. Raises NotFound."""
        accounts = self.accounts()
        if user not in accounts:
            raise NotFound(f"no account {user!r}: there are {', '.join(accounts)}")
        return accounts[user]

    def _variables(self, user: str) -> dict[str, str]:
        """What stands in an account's env file. Raises CliError."""
        path = self.path / "env" / f"{user}.env"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise CliError(f"{path}: {error.strerror}: what account {user} is for stands there") from error
        pairs = (line.partition("=") for line in lines if not line.startswith("#"))
        return {name: value for name, _, value in pairs}

    def _rules(self, user: str, server: str) -> list[str]:
        """The rights that this version gives an account."""
        if user == "bookkeeper":
            return queue_acl.for_bookkeeper() if server == "queue" else wire_acl.for_onlooker()
        if user == "client":
            return queue_acl.for_client() if server == "queue" else wire_acl.for_onlooker()
        if user == "flower":
            return queue_acl.for_flower()
        name = _name_of(user, self._variables(user))
        return name.queue_rules() if server == "queue" and isinstance(name, HeadName) else name.wire_rules()

    def _remote(self) -> Iterator[str]:
        """The accounts of other machines."""
        yield from (user for user in self.accounts() if user not in OF_THE_HOST)

    def _elsewhere(self) -> Reach:
        """How other machines find the servers, from the file of one of them."""
        for user in self._remote():
            variables = self._variables(user)
            wire = urlsplit(variables["SHARDQ_RELAY_URL"])
            ports = self._port("queue"), self._port("wire"), self._web_port()
            return Reach(str(wire.hostname), *ports, variables.get("SHARDQ_TLS_CA"))
        raise CliError(f"{self.path} has no account of a head or tail: its host's name is not known")

    def _port(self, server: str) -> int:
        text = (self.path / server / "redis.conf").read_text(encoding="utf-8")
        found = re.search(r"^tls-port (\d+)$", text, re.MULTILINE)
        if found is None:
            raise CliError(f"{self.path / server / 'redis.conf'}: no line tls-port")
        return int(found[1])

    def _web_port(self) -> int:
        found = _WEB_PORT.search((self.path / "compose.env").read_text(encoding="utf-8"))
        if found is None:
            raise CliError(f"{self.path / 'compose.env'}: no line SHARDQ_WEB_PORT")
        return int(found[1])


def _name_of(user: str, variables: dict[str, str]) -> HeadName | TailName:
    if head_id := variables.get("SHARDQ_HEAD_ID"):
        return HeadName(head_id, variables.get("SHARDQ_NAME"))
    if name := variables.get("SHARDQ_TAIL_NAME"):
        return TailName(name)
    raise CliError(f"env/{user}.env names neither a head nor a tail: expected SHARDQ_HEAD_ID or SHARDQ_TAIL_NAME")


def _with_password(line: str, queue: Account | None, wire: Account | None) -> str:
    account = queue if line.startswith("SHARDQ_BROKER_URL=") else wire
    if account is None:
        return line
    return _PASSWORD.sub(rf"\g<before>{account.password}\g<after>", line)


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a file in place of another, or of none, in one step. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
