"""What came out of a batch: one by one, or as a DataFrame."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cli.client.transport import Transport
from cli.errors import InputRefused, PackageMissing
from storage.columns import JOB_COLUMNS, Kind
from storage.errors import FilterInvalid
from storage.filters import Condition, JobFilter, check_columns
from storage.job_records import JobRow
from storage.states import JobState
from tasks.openai_results import input_of

if TYPE_CHECKING:
    import pandas

#: not a column of the database, but of the results
NUM_CHOICES = "num_choices"
#: columns of csv, parquet and DataFrames
ALL_COLUMNS = (*JOB_COLUMNS, NUM_CHOICES)
#: columns of what a job was made from; of prompt and messages one is empty
INPUT_COLUMNS = ("prompt", "messages", "metadata")
#: what results have beside the database's columns
RESULT_COLUMNS = (NUM_CHOICES, *INPUT_COLUMNS)
#: column → kind
KINDS = {**JOB_COLUMNS, NUM_CHOICES: Kind.INTEGER, **dict.fromkeys(INPUT_COLUMNS, Kind.TEXT)}

#: kinds of columns as pandas holds them, with a place for nothing
_DTYPES = {Kind.TEXT: "object", Kind.INTEGER: "Int64", Kind.NUMBER: "float64", Kind.TIME: "float64"}


def filter_of(states: frozenset[JobState], where: str | Collection[str]) -> JobFilter:
    """Jobs with one of these states for which all of these conditions hold. Raises InputRefused."""
    texts = [where] if isinstance(where, str) else where
    try:
        return JobFilter(states, conditions=tuple(Condition.parse(text) for text in texts))
    except FilterInvalid as error:
        raise InputRefused(f"where: {error}") from error


class Results:
    """The ended jobs that were asked for, in input order. Every iteration reads anew, in bounded memory."""

    def __init__(self, transport: Transport, wanted: JobFilter, batch_id: str | None) -> None:
        self._transport = transport
        self._wanted = wanted
        self._batch_id = batch_id

    def __iter__(self) -> Iterator[JobRow]:
        return self._transport.jobs(self._wanted, self._batch_id, logprobs=True)

    def to_pandas(self, *, columns: Sequence[str] = ALL_COLUMNS, with_input: bool = False) -> pandas.DataFrame:
        """A row per job; times are UTC timestamps, whole numbers stay so beside empty places.

        `with_input`: also the columns `prompt`, `messages` and `metadata`. Of a job with several completions the row
        has the first. Raises InputRefused for a column that there is not, PackageMissing without pandas.
        """
        columns = with_inputs(columns) if with_input else columns
        _check_columns(columns)
        frames = _pandas()
        jobs = self._transport.jobs(self._wanted, self._batch_id, requests=need_requests(columns))
        rows = [[_value(value) for value in values_of(job, columns).values()] for job in jobs]
        table = frames.DataFrame(rows, columns=list(columns), dtype="object")
        return table.assign(**{name: _column(frames, table[name], name) for name in columns})


def with_inputs(columns: Sequence[str]) -> tuple[str, ...]:
    """These columns, and those of the input behind them."""
    return tuple(dict.fromkeys([*columns, *INPUT_COLUMNS]))


def need_requests(columns: Sequence[str]) -> bool:
    """Whether jobs have to come with their requests for these columns."""
    return not {"prompt", "messages"}.isdisjoint(columns)


def values_of(job: JobRow, columns: Sequence[str] = ALL_COLUMNS) -> dict[str, Any]:
    """A job's first text, its figures and its input as plain values, by column."""
    given = {**input_of(job), "metadata": job.metadata} if not set(INPUT_COLUMNS).isdisjoint(columns) else {}
    return {name: given.get(name) if name in INPUT_COLUMNS else getattr(job, name) for name in columns}


def _check_columns(names: Sequence[str]) -> None:
    """Raises InputRefused unless each is a column, and only once."""
    try:
        check_columns([name for name in names if name not in RESULT_COLUMNS])
    except FilterInvalid as error:
        raise InputRefused(f"columns: {error}") from error
    if len(set(names)) < len(names):
        raise InputRefused("columns: expected each name once")


def _pandas() -> Any:
    try:
        return import_module("pandas")
    except ModuleNotFoundError as error:
        raise PackageMissing("pandas is not installed: run `pip install 'shardq[pandas]'`") from error


def _value(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value  # a state is one of a kind of its own


def _column(frames: Any, values: Any, name: str) -> Any:
    kind = KINDS[name]
    typed = values.astype(_DTYPES[kind])
    return frames.to_datetime(typed, unit="s", utc=True) if kind == Kind.TIME else typed
