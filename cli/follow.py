"""Follow a batch to its end, then say what came out."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from cli.batches import batch_json, print_batch
from cli.client.batch import Batch
from cli.database import exit_code
from cli.destination import STDOUT
from cli.errors import CliError, ExitCode
from cli.output import print_json
from cli.result_files import write_results


def follow_to_end(batch: Batch, *, output: Path | None = None, as_json: bool) -> ExitCode:
    """Show progress until the batch has ended, then what came out; what the command exits with.

    `output`: a file for the results; with `-` stdout is theirs alone. Ctrl-C leaves the batch alone.
    Raises Interrupted, and CliError, after all else, if they cannot be written.
    """
    with batch.left_alone():
        batch.wait()
        unwritten = _try_to_write(batch, output) if output is not None else None
        figures = batch.figures()
        with redirect_stdout(sys.stderr) if output == STDOUT else nullcontext():
            if as_json:
                print_json(batch_json(batch.row, figures))
            else:
                print_batch(batch.row, figures)
    if unwritten is not None:
        raise unwritten
    return exit_code(batch.counts)


def _try_to_write(batch: Batch, output: Path) -> CliError | None:
    """Write the results; what to say if that cannot be done."""
    try:
        write_results(batch, output)
    except CliError as error:
        return CliError(f"{error.message}; `shardq results {batch.id} --output FILE` writes the results again")
    return None
