"""`shardq submit`: check a file, queue it, and watch it if asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from cli.database import exit_code, opened
from cli.errors import ExitCode, InputRefused
from cli.input_file import Check, ErrorSink, check_input, error_file, error_report, nowhere, open_input
from cli.jobs import batch_json, figures_json, print_batch
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import note, print_json, warn
from cli.reasons import look_around, why_nothing_moves
from cli.results import write_results
from cli.submission import (
    Models,
    Order,
    feed,
    served_models,
    shortened,
    tell_unserved,
    unserved_lines,
    write_batch,
)
from cli.watch import make_display, watch
from storage.batches import get_batch
from storage.database import Database
from storage.figures import batch_figures
from storage.records import BatchRow, Counts
from tasks.connection import connect, translated
from tasks.errors import ParameterInvalid, TaskError
from tasks.heads import live_heads
from tasks.openai_batch import Defaults
from tasks.settings import TaskSettings

#: seconds without progress after which the reasons are looked for, and between two looks
STALL_S = 20.0


@dataclass(frozen=True, slots=True)
class Afterwards:
    """What to do once the batch is queued."""

    wait: bool
    output: Path | None
    as_json: bool


@click.command("submit")
@click.argument("file", type=click.Path(allow_dash=True))
@click.option("--name", metavar="NAME", help="The batch's name. The same name and file again: go on with it.")
@click.option("--model", metavar="NAME", help="Served name for lines that name none.")
@click.option("--wait", is_flag=True, help="Show progress until the last job has ended.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --wait: write the results to this file (jsonl, or csv by its ending).",
)
@click.option(
    "--on-invalid",
    type=click.Choice(["reject", "skip"]),
    default="reject",
    show_default=True,
    help="Refuse a file with invalid lines, or leave them out.",
)
@click.option("--check", "check_only", is_flag=True, help="Only check the file; needs no Redis.")
@click.option("--max-errors", type=click.IntRange(1), default=20, show_default=True, help="Invalid lines to list.")
@click.option(
    "--errors",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every invalid line's number, field and reason to this file (jsonl).",
)
@click.option("--max-tokens", type=int, help="For lines that do not say. Default: 512.")
@click.option("--temperature", type=float, help="0 is greedy. Default: 1.")
@click.option("--top-p", type=float, help="Default: 1, off.")
@click.option("--top-k", type=int, help="Default: 0, off.")
@click.option("--min-p", type=float, help="Default: 0, off.")
@click.option("--seed", type=int, help="Default: one drawn for each job, and stored.")
@click.option("--stop", multiple=True, help="Text that ends a completion; may be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end-of-sequence token.")
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def submit_command(
    ctx: click.Context,
    /,
    file: str,
    name: str | None,
    model: str | None,
    wait: bool,
    output: Path | None,
    on_invalid: str,
    check_only: bool,
    max_errors: int,
    errors: Path | None,
    as_json: bool,
    stop: tuple[str, ...],
    **parameters: Any,
) -> None:
    """Check a file of prompts and queue it as a batch.

    FILE holds one JSON object a line (`-` reads stdin): the lines of the OpenAI Batch API, or {"prompt": …} or
    {"messages": […]} with parameters beside it. The whole file is checked before anything is queued.

    Prints the batch's id. Exit status: 2 for an invalid file; with --wait 0 only if every job succeeded.

    \b
    shardq submit prompts.jsonl --wait --output results.jsonl
    shardq submit prompts.jsonl --name nightly --max-tokens 256
    ssh HOST shardq submit - < prompts.jsonl
    """
    if output is not None and not wait:
        raise click.UsageError("--output needs --wait: later, `shardq results BATCH --output FILE` writes it", ctx)
    order = Order(name, _defaults(model, stop, parameters), skip_invalid=on_invalid == "skip")
    with open_input(file) as stream, error_file(errors) as tell:
        check = check_input(stream, order.defaults, max_errors, tell)
        _refuse_invalid(check, order, errors)
        if check_only:
            click.echo(f"{check.num_jobs} jobs, {check.num_errors} invalid lines")
            return
        ctx.exit(_submit(stream, check, order, Afterwards(wait, output, as_json), tell))


def _defaults(model: str | None, stop: tuple[str, ...], parameters: dict[str, Any]) -> Defaults:
    try:
        return Defaults.of(model=model, stop=list(stop) or None, **parameters)
    except ParameterInvalid as error:
        option = f"--{(error.field or 'model').replace('_', '-')}"
        raise InputRefused(f"{option}: {error.message}") from error


def _refuse_invalid(check: Check, order: Order, errors: Path | None) -> None:
    report = error_report(check, errors)
    if check.num_errors and not order.skip_invalid:
        raise InputRefused(report)
    if not check.num_jobs:
        raise InputRefused(report or "the file holds no request")
    if check.num_errors:
        warn(f"{check.num_errors} invalid lines are left out:\n{report}")


def _refuse_unserved(stream: BinaryIO, check: Check, order: Order, models: Models, tell: ErrorSink) -> None:
    unserved = unserved_lines(check, models)
    if not unserved:
        return
    if tell is not nowhere:
        tell_unserved(stream, order, models, tell)
    if not order.skip_invalid or len(unserved) == len(check.models):
        raise InputRefused("\n".join(shortened(list(unserved.values()))))
    for message in shortened(list(unserved.values())):
        warn(f"left out: {message}")


def _submit(stream: BinaryIO, check: Check, order: Order, afterwards: Afterwards, tell: ErrorSink) -> ExitCode:
    with opened() as database:
        models = served_models(database)
        _refuse_unserved(stream, check, order, models, tell)
        batch, existed = write_batch(database, stream, order, models)
        if existed:
            note(f"submitted before as {batch.id}: {batch.counts.num_ended} of its jobs have ended")
        batch = feed(database, batch)
        if not afterwards.wait:
            _print_queued(batch, afterwards.as_json)
            return ExitCode.OK
        return _wait(database, batch, afterwards)


def _print_queued(batch: BatchRow, as_json: bool) -> None:
    if as_json:
        print_json(batch_json(batch))
        return
    click.echo(batch.id)
    note(f"{batch.counts.total} jobs; `shardq status {batch.id}` says how far they are")
    for reason in why_nothing_moves(look_around(), batch.counts):
        warn(reason)


def _wait(database: Database, batch: BatchRow, afterwards: Afterwards) -> ExitCode:
    if not afterwards.as_json:
        click.echo(batch.id)
    try:
        follow(database, batch)
    except KeyboardInterrupt:
        note(f"the batch goes on without you: `shardq status {batch.id}`")
        return ExitCode.INTERRUPTED
    batch = get_batch(database, batch.id)
    if afterwards.output is not None:
        write_results(database, batch.id, afterwards.output)
    figures = batch_figures(database, batch.id)
    if afterwards.as_json:
        print_json({**batch_json(batch), "figures": figures_json(figures)})
    else:
        print_batch(batch, figures)
    return exit_code(batch.counts)


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
        started = batch.in_progress_at or time.time()
        watch(database, batch.id, started, display, live_tps=live_tps, on_poll=look)
    finally:
        display.close()
        client.close()
