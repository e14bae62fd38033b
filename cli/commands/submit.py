"""`shardq submit`: check a file, queue it, and watch it if asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from cli.batches import batch_json
from cli.database import opened
from cli.destination import STDOUT, refuse_same_file
from cli.durations import time_ahead
from cli.errors import ExitCode, InputRefused
from cli.follow import follow_to_end
from cli.input_file import Check, ErrorSink, check_input, error_file, error_report, nowhere, open_input
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, moment, note, print_json, warn
from cli.parameters import defaults_of, parameter_options
from cli.reasons import look_around, why_nothing_moves
from cli.result_files import check_place
from cli.submission import (
    Models,
    Order,
    Written,
    feed,
    served_models,
    shortened,
    tell_unserved,
    unserved_lines,
    write_batch,
)
from storage.batch_records import BatchRow
from storage.jobs import open_models
from storage.states import TERMINAL_STATUSES


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
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="With --wait: write the results to this file (jsonl, or csv or parquet by its ending), - for stdout.",
)
@click.option(
    "--on-invalid",
    type=click.Choice(["reject", "skip"]),
    default="reject",
    show_default=True,
    help="Refuse a file with invalid lines, or leave them out.",
)
@click.option("--priority", type=click.IntRange(0, 9), metavar="0-9", help="0 is served first, 9 last. Default: 5.")
@click.option(
    "--expires-in",
    "--completion-window",
    "expires_in_s",
    type=time_ahead,
    metavar="DURATION",
    help="Jobs that have not ended by then expire: 90s, 10m, 24h, 7d. Default: never.",
)
@click.option("--reuse", is_flag=True, help="Take stored results for jobs that were done before.")
@click.option("--check", "check_only", is_flag=True, help="Only check the file; needs no Redis.")
@click.option("--max-errors", type=click.IntRange(1), default=20, show_default=True, help="Invalid lines to list.")
@click.option(
    "--errors",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write every invalid line's number, field and reason to this file (jsonl), - for stdout.",
)
@parameter_options
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
    priority: int | None,
    expires_in_s: float | None,
    reuse: bool,
    check_only: bool,
    max_errors: int,
    errors: Path | None,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Check a file of prompts and queue it as a batch.

    FILE holds one JSON object a line (`-` reads stdin): the lines of the OpenAI Batch API, or {"prompt": …} or
    {"messages": […]} with parameters beside it. The whole file is checked before anything is queued.

    A submission that was cut off leaves nothing that runs: the same command with the same --name does it again.
    With --reuse, a job that is the same as a completed one (model, prompt, parameters, and seed unless it is
    greedy) gets that one's result, marked as such.

    Prints the batch's id. Exit status: 2 for an invalid file; with --wait 0 only if every job succeeded.

    \b
    shardq submit prompts.jsonl --wait --output results.jsonl
    shardq submit prompts.jsonl --name nightly --max-tokens 256
    shardq submit urgent.jsonl --priority 0 --expires-in 2h
    ssh HOST shardq submit - < prompts.jsonl
    """
    if output is not None and not wait:
        raise click.UsageError("--output needs --wait: later, `shardq results BATCH --output FILE` writes it", ctx)
    source = Path("/dev/stdin" if file == "-" else file)
    refuse_same_file({"FILE": source, "--output": output, "--errors": errors})
    if output is not None:
        check_place(output)
    defaults = defaults_of(model, parameters)
    order = Order(name, defaults, on_invalid == "skip", priority=priority, expires_in_s=expires_in_s, reuse=reuse)
    with open_input(file) as stream, error_file(errors) as tell:
        check = check_input(stream, order.defaults, max_errors, tell)
        _refuse_invalid(check, order, errors)
        if check_only:
            _print_check(check, as_json)
            return
        ctx.exit(_submit(stream, check, order, Afterwards(wait, output, as_json), tell))


def _print_check(check: Check, as_json: bool) -> None:
    if as_json:
        errors = [asdict(error) for error in check.errors]
        print_json({"jobs": check.num_jobs, "invalid_lines": check.num_errors, "errors": errors})
    else:
        click.echo(f"{check.num_jobs} jobs, {check.num_errors} invalid lines")


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
        written = write_batch(database, stream, order, models, check.endpoint)
        for remark in _remarks(written, order):
            note(remark)
        batch = feed(database, written.batch)
        if not afterwards.wait:
            _print_queued(batch, open_models(database, batch.id), afterwards.as_json)
            return ExitCode.OK
        if not afterwards.as_json:
            click.echo(batch.id, err=afterwards.output == STDOUT)
        return follow_to_end(database, batch, output=afterwards.output, as_json=afterwards.as_json)


def _remarks(written: Written, order: Order) -> Iterator[str]:
    """What may surprise somebody about the batch."""
    batch, counts = written.batch, written.batch.counts
    if written.resumed:
        yield f"an earlier submission of {batch.name!r} was cut off; this one has taken its place"
    if written.num_reused:
        yield f"{written.num_reused:,} of {counted(counts.total, 'job')} had a stored result"
    if not written.existed:
        return
    yield f"submitted before as {batch.id}: {counts.num_ended} of its {counted(counts.total, 'job')} have ended"
    if order.priority not in (None, batch.priority):
        yield f"its priority stays {batch.priority}"
    if order.expires_in_s is not None and batch.status not in TERMINAL_STATUSES:
        yield f"it expires as it would have: {moment(batch.expires_at) if batch.expires_at else 'never'}"
    if batch.status in TERMINAL_STATUSES and counts.completed < counts.total:
        yield f"`shardq retry {batch.id}` runs what failed or expired again"


def _print_queued(batch: BatchRow, models: frozenset[str], as_json: bool) -> None:
    if as_json:
        print_json(batch_json(batch))
        return
    click.echo(batch.id)
    if batch.status in TERMINAL_STATUSES:
        note(f"{counted(batch.counts.total, 'job')}, all ended; `shardq results {batch.id}` shows what came out")
        return
    note(f"{counted(batch.counts.total, 'job')}; `shardq status {batch.id}` says how far they are")
    for reason in why_nothing_moves(look_around(), batch.counts, models=models):
        warn(reason)
