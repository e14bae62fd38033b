"""What is kept and for how long: `delete`, `prune` and `backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.confirmation import confirm, yes_option
from cli.database import opened
from cli.destination import STDOUT
from cli.durations import age
from cli.errors import CliError
from cli.interruption import interruptible
from cli.options import database_option, json_option
from cli.output import counted, duration, note, print_json, size
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.errors import BatchNotFound, BatchOpen, DiskFull
from storage.retention import backup, delete_batch, ended_before, prune
from storage.states import DELETABLE_STATUSES

#: batches named before a confirmation
SHOWN = 10


@click.command("delete")
@click.argument("batches", metavar="BATCH…", nargs=-1, required=True)
@yes_option
@json_option
@database_option
def delete_command(batches: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete batches with everything they hold.

    Prompts, results and figures are overwritten in the database's files, and the name is free again. Backups keep
    theirs. BATCH is an id, the beginning of one, or a name. A batch that has not ended must be cancelled first.

    \b
    shardq delete nightly
    shardq delete batch_77192b3e batch_90ab --yes
    """
    with opened() as database:
        rows = list({row.id: row for row in (get_batch(database, name) for name in batches)}.values())
        for row in rows:
            _check_ended(row)
        _show(rows)
        with interruptible(lambda: _left(database, rows)):
            confirm(f"delete {_both(rows)}", yes=yes)
            deleted = [{"id": row.id, "jobs": _delete(database, row)} for row in rows]
            _empty_log(database)
    if as_json:
        print_json(deleted)
    else:
        click.echo(f"deleted {_both(rows)}")


@click.command("prune")
@click.option("--older-than", "age_s", type=age, metavar="DURATION", help="Since their end: 12h, 30d.")
@click.option("--vacuum", is_flag=True, help="Afterwards give the disk what the SQLite file has free.")
@click.option("--dry-run", is_flag=True, help="Only show which ones.")
@yes_option
@json_option
@database_option
@click.pass_context
def prune_command(
    ctx: click.Context, age_s: float | None, vacuum: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete batches that ended long ago.

    Batches that have not ended stay, however old they are. The file keeps the space for later batches: --vacuum, with
    or without --older-than, writes it anew without, which needs room for two copies more, and what would be written
    meanwhile waits.

    \b
    shardq prune --older-than 30d --dry-run
    shardq prune --older-than 30d --yes
    shardq prune --vacuum
    """
    if age_s is None and not vacuum:
        raise click.UsageError("Say how old: --older-than 30d.", ctx)
    with opened() as database:
        rows = [] if age_s is None else _prune(database, age_s, dry_run=dry_run, yes=yes)
        sizes = _vacuum(database) if vacuum and not dry_run else None
    if as_json:
        batches = [{"id": row.id, "jobs": row.counts.total} for row in rows]
        found: dict[str, Any] = {"dry_run": dry_run, "batches": batches}
        print_json(found | ({"bytes_before": sizes[0], "bytes_after": sizes[1]} if sizes else {}))
        return
    if rows:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {_both(rows)}")
    elif age_s is not None:
        note(f"no batch ended more than {duration(age_s)} ago")
    if sizes:
        click.echo(f"the file had {size(sizes[0])} and has {size(sizes[1])}")


@click.command("backup")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
@database_option
@click.pass_context
def backup_command(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Write a copy of the database to a file.

    The copy is one consistent state, also while jobs run. FILE must not exist yet. It is a database of its own:
    `--database-url sqlite:///FILE` reads it. PostgreSQL has pg_dump for that.

    \b
    shardq backup shardq-$(date +%F).sqlite3
    """
    if file == STDOUT:
        raise click.UsageError("A backup is a file, not a stream: name it, as shardq.sqlite3.", ctx)
    with opened() as database, interruptible(lambda: f"no backup was written to {file}"):
        backup(database, file)
    num_bytes = file.stat().st_size
    if as_json:
        print_json({"path": str(file.absolute()), "bytes": num_bytes})
    else:
        click.echo(f"{file} ({size(num_bytes)})")


def _prune(database: Database, age_s: float, *, dry_run: bool, yes: bool) -> list[BatchRow]:
    """Delete, or only show; the batches."""
    rows = [get_batch(database, found) for found in ended_before(database, database.now() - age_s)]
    if not rows:
        return []
    _show(rows)
    if dry_run:
        return rows
    with interruptible(lambda: _left(database, rows)):
        confirm(f"delete {_both(rows)}", yes=yes)
        try:
            prune(database, age_s)
        except DiskFull:
            _tell_no_room()
            prune(database, age_s, overwrite=False)
        _empty_log(database)
    return [row for row in rows if not _exists(database, row.id)]


def _vacuum(database: Database) -> tuple[int, int]:
    """Bytes of the file before and after."""
    file = database.sqlite_file
    if file is None:
        raise CliError("PostgreSQL gives space back by its own VACUUM: --vacuum is for SQLite")
    _empty_log(database)
    before = file.stat().st_size
    with interruptible(lambda: "the file is as it was"):
        database.shrink()
        _empty_log(database)
    return before, file.stat().st_size


def _empty_log(database: Database) -> None:
    """The log has what was deleted until it is emptied."""
    if not database.empty_log():
        held = f"another process reads the database: its log {database.sqlite_file}-wal still holds what was there"
        note(f"{held}; `shardq prune --vacuum` empties it once nobody reads")


def _tell_no_room() -> None:
    note("the disk has no room to overwrite them: their texts stay in the file until new ones take their place")


def _check_ended(row: BatchRow) -> None:
    if row.status not in DELETABLE_STATUSES:
        raise CliError(f"{row.id} is {row.status}: stop it first with `shardq cancel {row.id} --wait`")


def _left(database: Database, rows: list[BatchRow]) -> str:
    """What an interrupted deletion leaves behind: batches go one by one, each as a whole."""
    there = [row.id for row in rows if _exists(database, row.id)]
    if len(there) == len(rows):
        return "nothing was deleted"
    log = "; the database's log may hold what was in them, `shardq prune --vacuum` empties it"
    if not there:
        return f"deleted {_both(rows)}{log}"
    more = f" and {len(there) - SHOWN:,} more" if len(there) > SHOWN else ""
    return f"deleted {len(rows) - len(there):,} of {_batches(rows)}; still there: {', '.join(there[:SHOWN])}{more}{log}"


def _exists(database: Database, batch_id: str) -> bool:
    try:
        get_batch(database, batch_id)
    except BatchNotFound:
        return False
    return True


def _delete(database: Database, row: BatchRow) -> int:
    try:
        return delete_batch(database, row.id)
    except DiskFull:
        _tell_no_room()
        return delete_batch(database, row.id, overwrite=False)
    except BatchOpen as error:
        raise CliError(f"{error}: a retry opened it again; see `shardq status {row.id}`") from error


def _show(rows: list[BatchRow]) -> None:
    for row in rows[:SHOWN]:
        name = f" ({row.name})" if row.name else ""
        note(f"{row.id}{name}: {row.status}, {counted(row.counts.total, 'job')}")
    if len(rows) > SHOWN:
        note(f"… and {len(rows) - SHOWN:,} more")


def _both(rows: list[BatchRow]) -> str:
    return f"{_batches(rows)} with {counted(sum(row.counts.total for row in rows), 'job')}"


def _batches(rows: list[BatchRow]) -> str:
    return f"{len(rows):,} batch{'' if len(rows) == 1 else 'es'}"
