"""`shardq submit`: check a file, queue it, and watch it if asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from cli.batches import batch_json
from cli.client.batch import Batch
from cli.client.input_file import Check, check_input, open_input
from cli.client.submission import NOTHING_QUEUED, refuse_invalid
from cli.client.transport import Order
from cli.destination import STDOUT, refuse_same_file
from cli.durations import time_ahead
from cli.error_file import error_file, where_all_are
from cli.errors import ExitCode, Unavailable
from cli.follow import follow_to_end
from cli.interruption import interruptible
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, note, print_json, warn
from cli.parameters import defaults_of, model_options, parameter_options, read_metadata
from cli.result_files import check_place
from cli.terminal import Terminal, opened_client


@dataclass(frozen=True, slots=True)
class Afterwards:
    """What to do once the batch is queued."""

    wait: bool
    output: Path | None
    as_json: bool


@click.command("submit")
@click.argument("file", type=click.Path(allow_dash=True))
@click.option("--name", metavar="NAME", help="The batch's name. The same name and file again: go on with it.")
@model_options
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
@click.option(
    "--metadata",
    metavar="KEY=VALUE",
    multiple=True,
    callback=read_metadata,
    help="A note about the batch; may be given several times.",
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
    map_model: dict[str, str],
    any_model: bool,
    expect_model: tuple[str, ...],
    wait: bool,
    output: Path | None,
    on_invalid: str,
    priority: int | None,
    expires_in_s: float | None,
    metadata: dict[str, str] | None,
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

    Prints the batch's id. Exit status: 2 for an invalid file; with --wait 0 only if every job succeeded and no line
    was left out.

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
    order = Order(
        name,
        defaults_of(model, map_model, any_model, parameters),
        on_invalid == "skip",
        priority=priority,
        expires_in_s=expires_in_s,
        reuse=reuse,
        expected=frozenset(expect_model),
        metadata=metadata,
    )
    voice = Terminal()
    with interruptible(lambda: NOTHING_QUEUED), open_input(file, voice) as stream, error_file(errors) as tell:
        check = check_input(stream, order.defaults, voice, max_errors=max_errors, tell=tell)
        refuse_invalid(check, order, voice, where_all_are(errors))
        if check_only:
            _print_check(check, as_json)
            return
        with opened_client() as client:
            batch = client.place(stream, check, order, tell)
            with batch.left_alone(), _queued_for_all_that(batch):
                if wait and order.expected:
                    for reason in batch.obstacles():
                        warn(reason)
                ctx.exit(_after(batch, Afterwards(wait, output, as_json)))


@contextmanager
def _queued_for_all_that(batch: Batch) -> Iterator[None]:
    """Where the rest cannot be told: a status that would have a script submit the file again is none for that."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, Unavailable) as error:
        with suppress(OSError):
            warn(f"{error}; the batch is queued: `shardq status {batch.id}` says how far it is")
        raise click.exceptions.Exit(ExitCode.UNFINISHED) from error


def _print_check(check: Check, as_json: bool) -> None:
    if as_json:
        errors = [asdict(error) for error in check.errors]
        models = {name: number for name, number in check.models.items() if name is not None}
        shown = {"jobs": check.num_jobs, "invalid_lines": check.num_errors, "models": models, "errors": errors}
        print_json(shown)
        return
    click.echo(f"{counted(check.num_jobs, 'job')}, {counted(check.num_errors, 'invalid line')}")
    for name, number in check.models.items():
        if name is not None:
            note(f"{counted(number, 'line')} for {name!r}, if it is served (`shardq models` lists what is)")


def _after(batch: Batch, afterwards: Afterwards) -> ExitCode:
    if not afterwards.wait:
        _print_queued(batch, afterwards.as_json)
        return ExitCode.OK
    if not afterwards.as_json:
        click.echo(batch.id, err=afterwards.output == STDOUT)
    status = follow_to_end(batch, output=afterwards.output, as_json=afterwards.as_json)
    # Of the file, which is what was submitted, not all is done.
    return ExitCode.JOBS_FAILED if status == ExitCode.OK and batch.row.num_invalid_lines else status


def _print_queued(batch: Batch, as_json: bool) -> None:
    if as_json:
        print_json(batch_json(batch.row))
        return
    click.echo(batch.id)
    if batch.ended:
        note(f"{counted(batch.counts.total, 'job')}, all ended; `shardq results {batch.id}` shows what came out")
        return
    note(f"{counted(batch.counts.total, 'job')}; `shardq status {batch.id}` says how far they are")
    for reason in batch.obstacles():
        warn(reason)
