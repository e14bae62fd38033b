"""Results as files: OpenAI's lines, csv, parquet or a table, written as they are read."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import click

from cli.client.batch import Batch
from cli.client.results import ALL_COLUMNS, KINDS, need_requests, values_of, with_inputs
from cli.destination import STDOUT, check_writable, destination, replaced
from cli.errors import CliError
from cli.output import counted, figure, first_words, percent, print_table, state
from storage.columns import Kind
from storage.filters import JobFilter
from storage.job_records import JobRow
from storage.states import JobState
from tasks.json_text import json_text
from tasks.openai_results import error_of, result_line

#: jobs in a row group of a parquet file, and bytes of their requests
ROW_GROUP = 2000
ROW_GROUP_BYTES = 1 << 26
#: jobs of a table that are laid out together
TABLE_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Format:
    """How results are written. No columns: all of them, or what the format shows by itself."""

    name: str
    columns: tuple[str, ...] = ()
    #: also what jobs were made from
    with_input: bool = False
    #: begin csv with a byte order mark
    with_mark: bool = False

    @property
    def needs_requests(self) -> bool:
        """Whether the jobs have to come with their requests."""
        return self.with_input or need_requests(self.columns)

    @property
    def all_columns(self) -> tuple[str, ...]:
        """The columns of a format that has columns."""
        usual = self.columns or (() if self.name in ("jsonl", "table") else ALL_COLUMNS)
        return with_inputs(usual) if self.with_input and usual else usual

    def write(self, jobs: Iterable[JobRow], path: Path | None, option: str = "--output") -> None:
        """Into the file that `option` names, which appears only once it is complete, or to stdout. Raises CliError."""
        if self.name == "parquet":
            write_parquet(jobs, path, self.all_columns)
            return
        if self.name == "table" and (path is None or path == STDOUT):
            write_table(jobs, sys.stdout, self.all_columns)
            return
        with destination(path, option) as out:
            if self.with_mark:
                out.write("\ufeff")
            _WRITERS[self.name](jobs, out, self.all_columns)


#: ending of a file's name → format
ENDINGS = {"": "jsonl", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
FORMATS = ("jsonl", "csv", "parquet", "table")


def format_of(path: Path) -> str:
    """The format that a file's name asks for; jsonl if it has no ending. Raises UsageError for any other ending."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        message = f"--output {path}: expected a name that ends in .jsonl, .csv or .parquet"
        raise click.UsageError(message, click.get_current_context(silent=True))
    return ENDINGS[ending]


def _flat(job: JobRow, columns: Sequence[str]) -> dict[str, Any]:
    """A job's values for formats that have no lists and objects: those as JSON."""
    values = values_of(job, columns)
    return {name: json_text(value) if isinstance(value, dict | list) else value for name, value in values.items()}


def write_jsonl(jobs: Iterable[JobRow], out: TextIO, columns: Sequence[str] = ()) -> None:
    """A line per job: of OpenAI's output and error files, or an object with these columns."""
    for job in jobs:
        line = values_of(job, columns) if columns else result_line(job)
        out.write(json_text(line) + "\n")


def write_csv(jobs: Iterable[JobRow], out: TextIO, columns: Sequence[str] = ()) -> None:
    """A row per job, with a header; nothing where there is no value, times in Unix seconds."""
    writer = csv.writer(out)
    chosen = columns or ALL_COLUMNS
    writer.writerow(chosen)
    for job in jobs:
        writer.writerow(_flat(job, chosen).values())


def write_parquet(jobs: Iterable[JobRow], path: Path | None, columns: Sequence[str] = ALL_COLUMNS) -> None:
    """Row groups of `ROW_GROUP` jobs; times are UTC timestamps, whole numbers stay so beside empty places."""
    if path is None or path == STDOUT:
        raise CliError("parquet is not for a terminal or a pipe: name a file with --output FILE.parquet")
    import pyarrow
    from pyarrow import parquet

    types = {
        Kind.TEXT: pyarrow.string(),
        Kind.INTEGER: pyarrow.int64(),
        Kind.NUMBER: pyarrow.float64(),
        Kind.TIME: pyarrow.timestamp("us", tz="UTC"),
    }
    kinds = {name: KINDS[name] for name in columns}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])
    with replaced(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for group in _row_groups(jobs):
            rows = [_flat(job, columns) for job in group]
            values = {name: [_parquet_value(row[name], kind) for row in rows] for name, kind in kinds.items()}
            writer.write_table(pyarrow.table(values, schema=schema))


def _row_groups(jobs: Iterable[JobRow]) -> Iterator[list[JobRow]]:
    group: list[JobRow] = []
    num_bytes = 0
    for job in jobs:
        group.append(job)
        num_bytes += len(job.request or "")
        if len(group) == ROW_GROUP or num_bytes >= ROW_GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _parquet_value(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == Kind.TEXT:
        # Half a surrogate pair has no UTF-8.
        return str(value).encode("utf-8", "replace").decode()
    return round(value * 1_000_000) if kind == Kind.TIME else value


def write_table(jobs: Iterable[JobRow], out: TextIO, columns: Sequence[str] = ()) -> None:
    """The table people read, a page at a time."""
    remaining = iter(jobs)
    page = list(islice(remaining, TABLE_PAGE))
    print_page = _print_chosen if columns else _print_usual
    # An empty table still shows what it would hold.
    print_page(page, out, columns)
    while page := list(islice(remaining, TABLE_PAGE)):
        print_page(page, out, columns)


def _print_usual(jobs: Sequence[JobRow], out: TextIO, _: Sequence[str]) -> None:
    print_table(
        ["CUSTOM_ID", "END", "TOKENS", "TOK/S", "/ROUND", "ACC", "TEXT"],
        [table_row(job) for job in jobs],
        numbers={"TOKENS", "TOK/S", "/ROUND", "ACC"},
        ids={"CUSTOM_ID"},
        out=out,
    )


def _print_chosen(jobs: Sequence[JobRow], out: TextIO, columns: Sequence[str]) -> None:
    names = {column: column.upper() for column in columns}
    numbers = {names[column] for column in columns if KINDS[column] != Kind.TEXT}
    rows = [[_shown(value) for value in _flat(job, columns).values()] for job in jobs]
    print_table(list(names.values()), rows, numbers=numbers, ids={"CUSTOM_ID"}, out=out)


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.10g}" if value >= 1e6 else f"{value:.4g}"
    return first_words(value, 60) if isinstance(value, str) else value


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


_WRITERS: dict[str, Callable[[Iterable[JobRow], TextIO, Sequence[str]], None]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "table": write_table,
}


def check_place(path: Path) -> None:
    """Find out before a batch runs what would keep `write_results` from writing it. Raises CliError."""
    if format_of(path) == "parquet":
        import_module("pyarrow")
    check_writable(path)


def write_results(batch: Batch, path: Path) -> None:
    """All results of a batch into a file, in the format that its name asks for. Raises CliError."""
    form = format_of(path)
    Format(form).write(batch.jobs(JobFilter(), logprobs=form == "jsonl"), path)
