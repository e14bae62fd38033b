"""`shardq init-server`: a hardened set of files for the public host."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from cli.errors import CliError
from cli.hosting import certificates
from cli.hosting.certificates import Certificates
from cli.hosting.server_files import HeadName, ServerPlan, TailName, files, write_files
from cli.hosting.web_proxy import WEB_USER, password_file, wheel_directory
from cli.hosting.wheel import put_wheel
from cli.interruption import interruptible
from cli.manner import manner
from cli.options import refuse_password
from cli.output import note
from storage.database import parse_url
from storage.errors import DatabaseUrlInvalid

#: no character that a key's pattern would read as more than itself
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
#: what a shell, systemd and Docker read alike without quotes
_PATH = re.compile(r"/[A-Za-z0-9._/@+-]*")
_URL = re.compile(r"[A-Za-z0-9._~:/?@%+,=&\[\]-]+")
_MEMORY = re.compile(r"[1-9][0-9]*(kb|mb|gb)")
#: where the database's address may stand, password and all
_DATABASE_VARIABLE = "SHARDQ_DATABASE_URL"
#: names under which processes on the host itself find the servers
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

_existing = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("init-server")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Name or address of the host; may be repeated.")
@click.option("--head", "heads", multiple=True, metavar="ID[=MODEL]", help="A head, and what it serves. Default: head.")
@click.option("--tail", "tails", multiple=True, metavar="NAME", help="A tail. Default: tail.")
@click.option("--cert", type=_existing, help="The servers' certificate, with its chain; made if not given.")
@click.option("--key", type=_existing, help="Its private key.")
@click.option("--ca", type=_existing, help="Certificate of the authority that signed --cert, if it is a private one.")
@click.option("--days", default=1825, show_default=True, type=click.IntRange(1, 3650), help="Life of a made one.")
@click.option(
    "--ca-path",
    default="/etc/shardq/ca.crt",
    show_default=True,
    metavar="PATH",
    help="Where heads and tails will keep ca.crt.",
)
@click.option(
    "--database",
    "database_url",
    metavar="URL",
    help="For bookkeeper and clients: postgresql://HOST/NAME, so that others can submit.  [env: SHARDQ_DATABASE_URL]",
)
@click.option("--queue-port", default=6379, show_default=True, type=click.IntRange(1, 65535), help="Of the queue.")
@click.option("--wire-port", default=6380, show_default=True, type=click.IntRange(1, 65535), help="Of the wire.")
@click.option("--web-port", default=8443, show_default=True, type=click.IntRange(1024, 65535), help="Of the pages.")
@click.option("--queue-memory", default="256mb", show_default=True, metavar="SIZE", help="Most memory of the queue.")
@click.option("--wire-memory", default="256mb", show_default=True, metavar="SIZE", help="Most memory of the wire.")
def init_server_command(directory: Path, database_url: str | None, **options: Any) -> None:
    """Write what the public host needs to be safe.

    DIR, new or empty, gets two Redis configurations, one of a proxy in front of Flower and the metrics, accounts with
    random passwords and the least rights for every role, a certificate, and a file of variables for every process.
    Nothing is overwritten, no password is shown.

    \b
    shardq init-server /srv/shardq --host queue.example.org
    shardq init-server /srv/shardq --host queue.example.org \\
        --head gpu-a=Qwen2.5-7B-Instruct --tail gpu-b
    shardq init-server /srv/shardq --database postgresql://db.example.org/shardq
    """
    url = _database_url(database_url, manner().placed)
    plan = _plan(directory.expanduser().absolute(), database_url=url, **options)
    with interruptible(lambda: _left(plan.directory)):
        _write(plan)
    note(f"wrote {plan.directory}: servers for {plan.host}, ports {plan.queue_port} (queue), {plan.wire_port} (wire)")
    try:
        put_wheel(plan.directory)
    except CliError as error:
        note(f"no wheel for notebooks in {wheel_directory(plan.directory)}: {error}")
    for line in _next_steps(plan):
        click.echo(line)


def _plan(
    directory: Path,
    *,
    hosts: Sequence[str],
    heads: Sequence[str],
    tails: Sequence[str],
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    days: int,
    ca_path: str,
    database_url: str | None,
    queue_port: int,
    wire_port: int,
    web_port: int,
    queue_memory: str,
    wire_memory: str,
) -> ServerPlan:
    """The options, checked. Raises click's errors and CliError."""
    names = [_host(name) for name in hosts] or [socket.getfqdn()]
    for option, path in (("DIR", str(directory)), ("--ca-path", ca_path)):
        if not _PATH.fullmatch(path):
            raise click.BadParameter(f"{option} {path!r}: use an absolute path of letters, digits and . _ / @ + -")
    if len({queue_port, wire_port, web_port}) < 3:
        raise click.UsageError("--queue-port, --wire-port and --web-port must differ.")
    return ServerPlan(
        directory=directory,
        host=names[0],
        # the user's own certificate need not be one for `localhost`
        local_host="localhost" if cert is None else names[0],
        queue_port=queue_port,
        wire_port=wire_port,
        web_port=web_port,
        queue_memory=_memory("--queue-memory", queue_memory),
        wire_memory=_memory("--wire-memory", wire_memory),
        heads=read_heads(heads or ["head"]),
        tails=read_tails(tails or ["tail"]),
        remote_ca=ca_path,
        database_url=database_url,
        certificates=_certificates(cert, key, ca, names, days),
    )


def _database_url(given: str | None, placed: Collection[str]) -> str | None:
    """The option's, else the variable's if the user set it. Raises click's errors, which do not repeat the address."""
    if given is not None:
        refuse_password(given, _DATABASE_VARIABLE)
    url = given or (None if _DATABASE_VARIABLE in placed else os.environ.get(_DATABASE_VARIABLE))
    if url is None:
        return None
    try:
        parsed = parse_url(url)
    except DatabaseUrlInvalid as error:
        raise click.BadParameter(f"--database: {error}") from error
    if not _URL.fullmatch(url):
        raise click.BadParameter("--database: use letters, digits and . _ ~ : / ? @ % + , = & -, others as %XX")
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).is_absolute():
        raise click.BadParameter("--database: expected sqlite:////ABSOLUTE/PATH or postgresql://USER@HOST/NAME")
    return url


def _certificates(
    cert: Path | None, key: Path | None, ca: Path | None, hosts: Sequence[str], days: int
) -> Certificates:
    if cert is not None and key is not None:
        return certificates.given(cert, key, ca)
    if cert is not None or key is not None or ca is not None:
        raise click.UsageError("--cert and --key belong together, and --ca to both of them.")
    return certificates.make(list(dict.fromkeys([*hosts, *_LOCAL_NAMES])), days)


def _write(plan: ServerPlan) -> None:
    """All of it or nothing, into a new directory or an empty one. Raises CliError."""
    directory = plan.directory
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CliError(f"{directory} is not empty: name a new directory or an empty one, nothing is overwritten")
        directory.chmod(0o700)
        # first in a corner of it, so that nobody takes a half for the whole; beside it may be nothing of ours
        with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as corner:
            write_files(Path(corner) / "set", list(files(plan)))
            for path in sorted((Path(corner) / "set").iterdir()):
                path.rename(directory / path.name)
    except PermissionError as error:
        hint = f'make it yours first: `sudo install -d -o "$USER" {directory}`'
        raise CliError(f"cannot write {error.filename or directory}: {error.strerror} ({hint})") from error
    except OSError as error:
        raise CliError(f"cannot write {error.filename or directory}: {error.strerror}") from error


def _left(directory: Path) -> str:
    """What an interrupted writing leaves behind."""
    there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if not there:
        return "nothing was written"
    return f"{directory} is not whole: remove what stands in it ({', '.join(there)}), then run it again"


def _next_steps(plan: ServerPlan) -> Iterator[str]:
    place = plan.directory
    yield f"on {plan.host}:"
    yield f"  docker compose --env-file {place}/compose.env up -d"
    yield from _who_submits(plan)
    yield f"  Flower and /metrics: https://{plan.host}:{plan.web_port}/"
    yield f"  user {WEB_USER}, password in {password_file(place)}"
    yield "to the other machines, over SSH only, for the env files hold passwords:"
    ca = " and ca/ca.crt" if plan.has_ca else ""
    for head in plan.heads:
        yield f"  head {head.head_id}: {place}/env/{head.user}.env{ca}"
    if plan.has_remote_clients:
        yield f"  whoever submits: {place}/env/client.env{ca}; it holds the database's address"
    for tail in plan.tails:
        yield f"  tail {tail.name}: {place}/env/{tail.user}.env{ca}"
    if plan.has_ca:
        yield f"  ca.crt is expected at {plan.remote_ca} there (SHARDQ_TLS_CA in the env files)"


def _who_submits(plan: ServerPlan) -> Iterator[str]:
    client = plan.directory / "env" / "client.env"
    if plan.has_remote_clients:
        yield f"  whoever submits, here or elsewhere, uses {client}"
        return
    where = "" if plan.database_url else ", as the user who runs the bookkeeper: the database is that user's"
    yield f"  whoever submits does it on this host: `deploy/shardq submit -`, or with {client}{where}"
    yield f"  and from elsewhere over ssh: `ssh {plan.host} shardq submit - < prompts.jsonl`"


def read_heads(values: Sequence[str]) -> tuple[HeadName, ...]:
    """The heads that `--head` names. Raises click's errors."""
    heads = []
    for value in values:
        head_id, equals, model = value.partition("=")
        if not _ID.fullmatch(head_id) or (equals and not _MODEL.fullmatch(model)):
            raise click.BadParameter(f"{value!r}: expected ID or ID=MODEL, letters, digits, '.', '_' or '-'.")
        heads.append(HeadName(head_id, model if equals else None))
    _all_different("--head", [head.head_id for head in heads])
    return tuple(heads)


def read_tails(values: Sequence[str]) -> tuple[TailName, ...]:
    """The tails that `--tail` names. Raises click's errors."""
    for value in values:
        if not _ID.fullmatch(value):
            raise click.BadParameter(f"--tail {value!r}: use letters, digits, '.', '_' or '-'.")
    _all_different("--tail", values)
    return tuple(TailName(value) for value in values)


def _all_different(option: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        raise click.UsageError(f"{option} names the same twice.")


def _host(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if not _HOST.fullmatch(name):
            raise click.BadParameter(f"--host {name!r} is neither a host name nor an address.") from None
        return name.lower()


def _memory(option: str, value: str) -> str:
    if not _MEMORY.fullmatch(value.lower()):
        raise click.BadParameter(f"{option} {value!r}: expected a size as 256mb.")
    return value.lower()
