"""`shardq results`: what came out of a batch."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from cli.database import exit_code, opened
from cli.errors import CliError
from cli.options import database_option
from cli.output import counted, figure, first_words, percent, print_table, state, warn
from storage.batches import get_batch
from storage.database import Database
from storage.jobs import iterate_results
from storage.records import JobRow
from storage.states import TERMINAL_STATES, JobState
from tasks.openai_results import error_of, result_line

#: columns of the csv format: every stored figure of a job
CSV_COLUMNS = [
    *("custom_id", "line", "model", "state", "finish_reason", "error_type", "error_message", "text"),
    *("prompt_tokens", "completion_tokens", "ttft_s", "decode_tps", "e2e_tps", "rounds", "tokens_per_round"),
    *("drafted", "accepted", "acceptance", "cached_tokens", "wire_bytes_up", "wire_bytes_down"),
    *("queue_s", "draft_s", "head_s", "link_s", "tail_s", "started_at", "finished_at", "head", "attempt"),
    "wire_dtype",
    "reused_from",
    "num_choices",
]

#: states whose lines go into the error file
_NOT_DONE = TERMINAL_STATES - {JobState.COMPLETED}


@click.command("results")
@click.argument("batch")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "table"]),
    help="Default: table on a terminal, else jsonl.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option(
    "--errors",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the lines of jobs that did not succeed to this file (jsonl).",
)
@database_option
@click.pass_context
def results_command(
    ctx: click.Context, batch: str, form: str | None, as_json: bool, output: Path | None, errors: Path | None
) -> None:
    """Results of a batch, in input order.

    BATCH is an id, the beginning of one, or a name. jsonl writes the lines of the OpenAI Batch API: the jobs that
    have ended, or with --errors only those that succeeded. Jobs that failed, were cancelled or expired have an error
    with a code; what they had written by then is their shardq.partial_text.

    Of a job with several completions (n) jsonl has all of them; csv and table have the first, and say how many there
    are.

    Exit status: 0 if every job succeeded, 3 if one did not, 4 while jobs are open.

    \b
    shardq results nightly --output out.jsonl --errors errors.jsonl
    shardq results nightly --format csv > figures.csv
    """
    chosen = "jsonl" if as_json else form or _default_format(output)
    with opened() as database:
        row = get_batch(database, batch)
        jobs = iterate_results(database, row.id, states=TERMINAL_STATES, logprobs=chosen == "jsonl")
        with _destination(output) as out:
            WRITERS[chosen](_without_errors(jobs, errors, chosen), out)
        if errors is not None:
            failed = iterate_results(database, row.id, states=_NOT_DONE)
            with _destination(errors) as out:
                write_jsonl(failed, out)
    if row.counts.num_open:
        warn(f"{row.counts.num_open} of {row.counts.total} jobs have not ended yet")
    ctx.exit(exit_code(row.counts))


def _default_format(output: Path | None) -> str:
    return "table" if output is None and sys.stdout.isatty() else "jsonl"


def _without_errors(jobs: Iterable[JobRow], errors: Path | None, form: str) -> Iterator[JobRow]:
    """The jobs, less those that the error file takes."""
    for job in jobs:
        if job.state == JobState.COMPLETED or errors is None or form != "jsonl":
            yield job


@contextmanager
def _destination(path: Path | None) -> Iterator[TextIO]:
    """Stdout, or a file that appears only once it is complete."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as out:
            yield out
        temporary.replace(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_jsonl(jobs: Iterable[JobRow], out: TextIO) -> None:
    """One line per job in the shape of OpenAI's output and error files."""
    for job in jobs:
        out.write(json.dumps(result_line(job), ensure_ascii=False) + "\n")


def write_csv(jobs: Iterable[JobRow], out: TextIO) -> None:
    """Every stored figure of each job, with a header."""
    writer = csv.writer(out)
    writer.writerow(CSV_COLUMNS)
    for job in jobs:
        writer.writerow(result_json(job).values())


def result_json(job: JobRow) -> dict[str, Any]:
    """A job's first text and its figures as plain JSON values."""
    return {name: getattr(job, name) for name in CSV_COLUMNS}


def write_table(jobs: Iterable[JobRow], out: TextIO) -> None:
    """The table people read."""
    print_table(
        ["CUSTOM_ID", "END", "TOKENS", "TOK/S", "/ROUND", "ACC", "TEXT"],
        [table_row(job) for job in jobs],
        numbers={"TOKENS", "TOK/S", "/ROUND", "ACC"},
        out=out,
    )


def table_row(job: JobRow) -> tuple[Any, ...]:
    """A job in the columns of `write_table`."""
    is_done = job.state == JobState.COMPLETED
    text = job.text if is_done or job.text else _without_text(job)
    return (
        job.custom_id,
        job.finish_reason if is_done else state(job.state),
        job.completion_tokens,
        figure(job.decode_tps),
        figure(job.tokens_per_round, 2),
        percent(job.accepted or 0, job.drafted or 0),
        f"{first_words(text, 60)}{_others(job)}",
    )


def _others(job: JobRow) -> str:
    """That there is more than the text that is shown."""
    return f" (+ {counted(len(job.choices), 'choice')})" if job.choices else ""


def _without_text(job: JobRow) -> str:
    """Why there is none. The state alone says what code a stopped job has."""
    code, message = error_of(job)
    return f"{code}: {message}" if job.state == JobState.FAILED else message


def write_results(database: Database, batch_id: str, path: Path) -> None:
    """All results of a batch into a file: csv if its name says so, else jsonl. Raises CliError."""
    writer = write_csv if path.suffix.lower() == ".csv" else write_jsonl
    with _destination(path) as out:
        jobs = iterate_results(database, batch_id, states=TERMINAL_STATES, logprobs=writer is write_jsonl)
        writer(jobs, out)


WRITERS: dict[str, Callable[[Iterable[JobRow], TextIO], None]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "table": write_table,
}
