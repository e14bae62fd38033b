"""`shardq restore`: a backup in the place of the database."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from cli.errors import CliError
from cli.interruption import interruptible
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import note, print_json
from storage.database import parse_url
from storage.restoring import restore
from storage.settings import StorageSettings
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.settings import TaskSettings


@click.command("restore")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
@database_option
@broker_option
@insecure_option
def restore_command(file: Path, as_json: bool) -> None:
    """Put a backup in the place of the database.

    FILE is one that `shardq backup` or an upgrade wrote. Stop the bookkeeper first, and start it afterwards. What is
    there now is kept beside it. Jobs that were under way when the backup was made go on; those whose results came later
    run again; results of jobs that the backup does not have are kept, see `shardq rejected`. PostgreSQL has its own
    tools.

    \b
    shardq restore shardq-2026-11-30.sqlite3
    """
    target = _target()
    _refuse_at_work()
    with interruptible(lambda: f"{target} is as it was, or restored: do it again"):
        kept = restore(file, target)
    if as_json:
        print_json({"path": str(target), "kept": str(kept) if kept else None})
        return
    click.echo(f"restored {target} from {file}")
    if kept:
        note(f"what was there is in {kept}")
    note("start the bookkeeper with it: `shardq bookkeeper`, or `shardq up`")


def _target() -> Path:
    url = parse_url(StorageSettings().database_url)
    if url.get_backend_name() != "sqlite":
        raise CliError("the database is PostgreSQL: restore it with its own tools, while the bookkeeper is stopped")
    return Path(str(url.database)).absolute()


def _refuse_at_work() -> None:
    """Raise CliError while a bookkeeper is at work, as far as that can be asked."""
    try:
        with closing(connect(TaskSettings())) as client, translated():
            at_work = bool(client.exists(keys.BOOKKEEPER))
    except TaskError:
        return  # the server is away, and with it whoever works through it
    if at_work:
        raise CliError("a bookkeeper is at work: stop it first (one that was killed counts as at work for 8 s)")
