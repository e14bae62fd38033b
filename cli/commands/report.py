"""`shardq report`: pictures of a batch in one file."""

from __future__ import annotations

from pathlib import Path

import click

from cli.database import opened
from cli.destination import STDOUT, replaced
from cli.options import database_option
from cli.output import note
from cli.report.page import page
from storage.batches import get_batch
from storage.figures import batch_figures
from storage.series import batch_series


@click.command("report")
@click.argument("batch")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write to this file, - for stdout.  [default: the batch's id with .html]",
)
@database_option
def report_command(batch: str, output: Path | None) -> None:
    """Pictures of a batch in one HTML file.

    BATCH is an id, the beginning of one, or a name. The page shows headline figures, tokens per second and slots
    over time, where the time went, acceptance, the distributions of times, the slowest jobs and the errors: of the
    jobs that have ended so far. It fetches nothing and runs no script.

    \b
    shardq report nightly --output nightly.html
    """
    with opened() as database:
        row = get_batch(database, batch)
        html = page(row, batch_figures(database, row.id), batch_series(database, row.id), database.now())
    # A model may leave half a surrogate pair in a message.
    content = html.encode("utf-8", "replace")
    if output == STDOUT:
        click.echo(content, nl=False)
        return
    path = output or Path(f"{row.id}.html")
    with replaced(path) as temporary:
        temporary.write_bytes(content)
    note(f"written to {path}: open it in a browser")
