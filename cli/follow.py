"""Follow a batch to its end, and say why if nothing moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from cli.batches import batch_json, print_batch
from cli.database import exit_code
from cli.destination import STDOUT
from cli.errors import CliError, ExitCode
from cli.output import note, print_json
from cli.reasons import look_around, why_nothing_moves
from cli.result_files import write_results
from cli.watch import make_display, watch
from storage.batch_records import BatchRow, Counts
from storage.batches import get_batch
from storage.database import Database
from storage.figures import batch_figures
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import live_heads
from tasks.settings import TaskSettings

#: seconds without progress after which the reasons are looked for, and between two looks
STALL_S = 20.0


class StallWatch:
    """Says why nothing moves, once nothing has moved for a while."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._since = clock()
        self._counts: Counts | None = None

    def __call__(self, counts: Counts) -> None:
        """Look at the newest counts."""
        now = self._clock()
        if counts != self._counts or counts.running:
            self._since, self._counts = now, counts
        elif now - self._since > STALL_S:
            self._since = now
            for reason in why_nothing_moves(look_around(), counts):
                self._say(reason)


def follow(database: Database, batch: BatchRow, on_poll: Callable[[], None] = lambda: None) -> None:
    """Show progress until the batch has ended, and say why if nothing moves."""
    display = make_display()
    client = connect(TaskSettings())

    def live_tps() -> float | None:
        try:
            with translated():
                return sum(head.tokens_per_s for head in live_heads(client))
        except TaskError:
            return None  # shown as what the database saw; a lost server is told by the stall watch

    stall = StallWatch(display.say)

    def look(counts: Counts) -> None:
        on_poll()
        stall(counts)

    try:
        started = batch.working_since or time.time()
        watch(database, batch.id, started, display, live_tps=live_tps, on_poll=look)
    finally:
        display.close()
        client.close()


def follow_to_end(database: Database, batch: BatchRow, *, output: Path | None = None, as_json: bool) -> ExitCode:
    """Show progress until the batch has ended, then what came out; what the command exits with.

    `output`: a file for the results; with `-` stdout is theirs alone. Ctrl-C leaves the batch alone.
    Raises CliError, after all else, if they cannot be written.
    """
    try:
        follow(database, batch)
    except KeyboardInterrupt:
        note(f"the batch goes on without you: `shardq status {batch.id}`, or stop it with `shardq cancel {batch.id}`")
        return ExitCode.INTERRUPTED
    batch = get_batch(database, batch.id)
    unwritten = _try_to_write(database, batch.id, output) if output is not None else None
    figures = batch_figures(database, batch.id)
    with redirect_stdout(sys.stderr) if output == STDOUT else nullcontext():
        if as_json:
            print_json(batch_json(batch, figures))
        else:
            print_batch(batch, figures)
    if unwritten is not None:
        raise unwritten
    return exit_code(batch.counts)


def _try_to_write(database: Database, batch_id: str, output: Path) -> CliError | None:
    """Write the results; what to say if that cannot be done."""
    try:
        write_results(database, batch_id, output)
    except CliError as error:
        return CliError(f"{error.message}; `shardq results {batch_id} --output FILE` writes the results again")
    return None
