"""`docs/schema.md` says what the tables hold: every column, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from storage.columns import JOB_COLUMNS
from storage.tables import job, metadata

TEXT = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def rows_of(table: str) -> list[list[str]]:
    """The cells of the table's columns."""
    lines = [line for line in SECTIONS[table].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_table_has_a_section() -> None:
    assert set(SECTIONS) == set(metadata.tables)


@pytest.mark.parametrize("table", metadata.tables)
def test_every_column_is_documented_once_and_no_other(table: str) -> None:
    documented = [row[0].strip("`") for row in rows_of(table)]
    assert sorted(documented) == sorted(metadata.tables[table].columns.keys())


def test_the_columns_that_results_know_are_marked() -> None:
    assert {row[0].strip("`") for row in rows_of("job") if row[1] == "q"} == set(JOB_COLUMNS)


def test_times_and_durations_have_their_units() -> None:
    units = {row[0].strip("`"): row[2] for row in rows_of("job")}
    assert {units[name] for name in job.c.keys() if name.endswith("_at")} == {"Unix s"}  # noqa: SIM118
    assert {units[name] for name in job.c.keys() if name.endswith("_s")} == {"s"}  # noqa: SIM118
