"""`shardq results`: what came out of a batch, or of all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import click

from cli.batches import not_ended
from cli.client.batch import NOT_DONE
from cli.database import exit_code
from cli.destination import STDOUT, refuse_same_file
from cli.errors import ExitCode
from cli.filters import filter_options, read_columns
from cli.interruption import interruptible
from cli.options import database_option
from cli.output import warn
from cli.result_files import FORMATS, Format, format_of
from cli.terminal import opened_client
from storage.batch_records import Counts
from storage.filters import Condition, JobFilter
from storage.job_records import JobRow
from storage.states import TERMINAL_STATES, JobState

#: what a batch as OpenAI's object calls its two files
_FILE_ID = re.compile(r"file-(?P<batch>batch_[0-9a-f]+)-(?P<kind>output|errors)")


@click.command("results")
@click.argument("batch", required=False)
@filter_options
@click.option(
    "--columns",
    metavar="NAMES",
    callback=read_columns,
    help="Only these columns, in this order, with commas between them.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Default: by the ending of --output; else table on a terminal, jsonl elsewhere.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write to this file, - for stdout.",
)
@click.option(
    "--errors",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the lines of jobs that did not succeed to this file (jsonl), - for stdout.",
)
@click.option(
    "--with-input",
    is_flag=True,
    help="Also what jobs were made from: prompt or messages, and metadata.",
)
@click.option("--bom", is_flag=True, help="Begin csv with a byte order mark: Excel needs it to read UTF-8.")
@database_option
@click.pass_context
def results_command(
    ctx: click.Context,
    batch: str | None,
    failed: bool,
    model: str | None,
    since: float | None,
    conditions: tuple[Condition, ...],
    columns: tuple[str, ...],
    form: str | None,
    as_json: bool,
    output: Path | None,
    errors: Path | None,
    with_input: bool,
    bom: bool,
) -> None:
    """Results of a batch, or all that meet a filter.

    They come in input order, of several batches the oldest first. BATCH is an id, the beginning of one, or a name.
    jsonl writes the lines of the OpenAI Batch API: the jobs that have ended, or with --errors only those that
    succeeded. Jobs that failed, were cancelled or expired have an error with a code; what they had written by then
    is their shardq.partial_text. With --columns, jsonl writes objects with those columns.

    --where compares a column with a value, as finish_reason=length or ttft_s>2; without a value (head=) it finds the
    jobs that have none. All filters must hold. docs/schema.md lists the columns.

    --with-input adds what jobs were made from: in jsonl under shardq, in csv and parquet as the columns prompt,
    messages and metadata, which --columns takes, too. BATCH may also be a batch's output_file_id or error_file_id.

    Of a job with several completions (n) jsonl has all of them; csv, parquet and table have the first, and say how
    many there are.

    Exit status: 0 if every job succeeded, 3 if one did not, 4 while jobs are open; with a filter or without BATCH 0.

    \b
    shardq results nightly --output out.jsonl --errors errors.jsonl
    shardq results nightly --output figures.parquet
    shardq results --since 7d --where finish_reason=length --columns id,text
    """
    wanted = JobFilter(NOT_DONE if failed else TERMINAL_STATES, model, since, conditions)
    is_filtered = wanted != JobFilter()
    batch, wanted = _behind_file_id(batch, wanted)
    if batch is None and not is_filtered:
        raise click.UsageError("Say which BATCH, or give a filter: --failed, --model, --since or --where.")
    refuse_same_file({"--output": output, "--errors": errors})
    chosen = Format("jsonl" if as_json else form or _default_format(output), columns, with_input, bom)
    _refuse_what_the_format_lacks(ctx, chosen)
    with opened_client() as client:
        one = client.batch(batch) if batch is not None else None
        source = one or client
        logprobs = chosen.name == "jsonl" and not columns
        jobs = source.jobs(wanted, logprobs=logprobs, requests=chosen.needs_requests)
        with interruptible(lambda: _unwritten(output)):
            chosen.write(_without_errors(jobs, errors, chosen.name), output)
        if errors is not None:
            not_done = source.jobs(replace(wanted, states=NOT_DONE), requests=with_input)
            with interruptible(lambda: _unwritten(errors)):
                Format("jsonl").write(not_done, errors, "--errors")
    ctx.exit(_say_what_is_open(one.counts, is_filtered) if one else ExitCode.OK)


def _unwritten(path: Path | None) -> str:
    """What an interrupted writing leaves behind."""
    if path is None or path == STDOUT:
        return "not all lines were printed"
    return f"{path} was not written: what it held before stays"


def _behind_file_id(reference: str | None, wanted: JobFilter) -> tuple[str | None, JobFilter]:
    """The batch and jobs that an `output_file_id` or `error_file_id` stands for; anything else as it is."""
    found = _FILE_ID.fullmatch(reference or "")
    if found is None:
        return reference, wanted
    states = NOT_DONE if found["kind"] == "errors" else frozenset({JobState.COMPLETED})
    return found["batch"], replace(wanted, states=states & wanted.states)


def _refuse_what_the_format_lacks(ctx: click.Context, chosen: Format) -> None:
    if chosen.with_mark and chosen.name != "csv":
        raise click.UsageError(f"--bom is for csv, not for {chosen.name}", ctx)
    if chosen.with_input and chosen.name == "table" and not chosen.columns:
        raise click.UsageError("--with-input needs --format jsonl, csv or parquet, or --columns in a table", ctx)


def _say_what_is_open(counts: Counts, is_filtered: bool) -> ExitCode:
    if counts.num_open:
        warn(not_ended(counts))
    return ExitCode.OK if is_filtered else exit_code(counts)


def _default_format(output: Path | None) -> str:
    if output is not None and output != STDOUT:
        return format_of(output)
    return "table" if sys.stdout.isatty() else "jsonl"


def _without_errors(jobs: Iterable[JobRow], errors: Path | None, form: str) -> Iterator[JobRow]:
    """The jobs, less those that the error file takes."""
    for job in jobs:
        if job.state == JobState.COMPLETED or errors is None or form != "jsonl":
            yield job
