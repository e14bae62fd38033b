"""`shardq server`: change a public host's accounts one at a time, and bring its files to this version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from cli.commands.init_server import read_heads, read_tails
from cli.errors import CliError
from cli.hosting.accounts import OF_THE_HOST, ServerDirectory
from cli.hosting.server_files import HeadName, TailName
from cli.hosting.wheel import put_wheel
from cli.interruption import interruptible
from cli.options import json_option
from cli.output import note, print_json, print_table

_directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


@click.group("server")
def server_command() -> None:
    """Accounts and files of a public host.

    DIR is the directory that init-server made. Every other machine keeps its files and goes on: running jobs wait for
    the second that a restart takes.

    \b
    shardq server accounts /srv/shardq
    shardq server add /srv/shardq --head gpu-c=Qwen2.5-7B-Instruct --tail gpu-d
    shardq server rotate /srv/shardq head-gpu-a
    shardq server revoke /srv/shardq tail-gpu-b
    shardq server update /srv/shardq
    """


@server_command.command("accounts")
@_directory
@json_option
def accounts_command(directory: Path, as_json: bool) -> None:
    """The accounts, and which servers each may use.

    \b
    shardq server accounts /srv/shardq
    """
    accounts = ServerDirectory.open(directory).accounts()
    if as_json:
        print_json([{"account": user, "servers": list(servers)} for user, servers in accounts.items()])
    else:
        print_table(["ACCOUNT", "SERVERS"], [(user, ", ".join(servers)) for user, servers in accounts.items()])


@server_command.command("add")
@_directory
@click.option("--head", "heads", multiple=True, metavar="ID[=MODEL]", help="A head, and what it serves.")
@click.option("--tail", "tails", multiple=True, metavar="NAME", help="A tail.")
def add_command(directory: Path, heads: Sequence[str], tails: Sequence[str]) -> None:
    """Make accounts for further heads and tails.

    \b
    shardq server add /srv/shardq --head gpu-c=Qwen2.5-7B-Instruct --tail gpu-d
    """
    names: list[HeadName | TailName] = [*read_heads(heads), *read_tails(tails)]
    if not names:
        raise click.UsageError("Name what to add, with --head or --tail.")
    with _written(directory):
        for name in names:
            click.echo(f"{name.user}: {ServerDirectory.open(directory).add(name)}")
    _tell_restart(directory, ["queue", "wire"] if heads else ["wire"])
    note("then send each file to its machine, over SSH only, with ca/ca.crt")


@server_command.command("rotate")
@_directory
@click.argument("accounts", metavar="ACCOUNT…", nargs=-1, required=True)
def rotate_command(directory: Path, accounts: Sequence[str]) -> None:
    """Give accounts new passwords; the old ones end with the restart.

    \b
    shardq server rotate /srv/shardq head-gpu-a
    """
    servers = _servers_of(directory, accounts)
    with _written(directory):
        for user in accounts:
            click.echo(f"{user}: {ServerDirectory.open(directory).rotate(user)}")
    _tell_restart(directory, servers)
    if here := [user for user in accounts if user in OF_THE_HOST]:
        note(f"then `docker compose --env-file {directory}/compose.env up -d`: {', '.join(here)} begins anew")
    if len(here) < len(accounts):
        note("then send the others' files to their machines, over SSH only, and start what runs there with them")


@server_command.command("revoke")
@_directory
@click.argument("accounts", metavar="ACCOUNT…", nargs=-1, required=True)
def revoke_command(directory: Path, accounts: Sequence[str]) -> None:
    """Remove accounts of heads and tails; they are shut out with the restart.

    \b
    shardq server revoke /srv/shardq tail-gpu-b
    """
    servers = _servers_of(directory, accounts)
    with _written(directory):
        for user in accounts:
            ServerDirectory.open(directory).revoke(user)
            click.echo(f"{user} is removed")
    _tell_restart(directory, servers)


@server_command.command("update")
@_directory
def update_command(directory: Path) -> None:
    """Bring the files to this version: rights of accounts, the proxy, the wheel for notebooks.

    Passwords, the certificate and everybody's env files stay as they are. Do this after an upgrade of the host.

    \b
    shardq server update /srv/shardq
    """
    with _written(directory):
        changed = ServerDirectory.open(directory).renew_rights()
        proxy = ServerDirectory.open(directory).renew_proxy()
        click.echo(f"rights changed: {', '.join(changed) or 'none'}")
        click.echo(f"proxy: {'changed' if proxy else 'as it was'}")
        click.echo(f"wheel: {_wheel(directory)}")
    if changed or proxy:
        _tell_restart(directory, [*(["queue", "wire"] if changed else []), *(["web"] if proxy else [])])


def _wheel(directory: Path) -> str:
    try:
        return str(put_wheel(directory))
    except CliError as error:
        return f"none, {error}"


def _servers_of(directory: Path, accounts: Sequence[str]) -> list[str]:
    """The servers of all these accounts. Raises NotFound before the first of them is changed."""
    known = ServerDirectory.open(directory)
    return [server for user in accounts for server in known.servers_of(user)]


@contextmanager
def _written(directory: Path) -> Iterator[None]:
    """Raises CliError for what cannot be written; what was done before stays done, also after Ctrl-C."""
    left = f"what was told is done; `shardq server accounts {directory}` shows the rest, do that again"
    try:
        with interruptible(lambda: left):
            yield
    except OSError as error:
        raise CliError(f"cannot write {error.filename or directory}: {error.strerror}") from error


def _tell_restart(directory: Path, services: Sequence[str]) -> None:
    names = " ".join(dict.fromkeys(services))
    note(f"in force after a restart: `docker compose --env-file {directory}/compose.env restart {names}`")
    note("(or of their units, shardq-redis@queue, shardq-redis@wire, shardq-web); jobs go on, everybody connects again")
