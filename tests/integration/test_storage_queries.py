"""What is asked of stored results, in each kind of database."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from storage.comparison import first_difference, only_in, pairs, shared_key
from storage.database import Database
from storage.errors import FilterInvalid, JobNotFound
from storage.filters import Condition, JobFilter
from storage.percentiles import distribution
from storage.queries import find_jobs, request_of
from storage.states import JobState
from tests.filled_database import START, fill

pytest_plugins = ["tests.integration.storage_databases"]

LONG = "a text of more than twenty characters"
QUERIES = re.findall(
    r"```sql\n(.*?)```", (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    with Database.open(url, clock=lambda: START) as database:
        yield database


def found(db: Database, *conditions: str, batch_id: str | None = None) -> list[str]:
    wanted = JobFilter(conditions=tuple(map(Condition.parse, conditions)))
    return [job.custom_id for job in find_jobs(db, wanted, batch_id=batch_id)]


def test_conditions_compare_columns_with_values(db: Database) -> None:
    fill(db, ["one", None, LONG, "four"])
    assert found(db, "finish_reason=length") == ["c3"]
    assert found(db, "finish_reason != stop") == ["c2", "c3"]
    assert found(db, "ttft_s>0.1", "ttft_s<=0.35") == ["c3"]
    assert found(db, "rounds=") == ["c2"]
    assert found(db, "rounds!=") == ["c1", "c3", "c4"]
    assert found(db, f"started_at>={START + 3}") == ["c3", "c4"]
    assert found(db, "text=four") == ["c4"]
    assert found(db, "line<2") == ["c1"]


def test_filters_reach_across_batches_in_their_order(db: Database) -> None:
    first, second = fill(db, ["one", None], prefix="a"), fill(db, [None, "two"], prefix="b", model="other")
    ids = {job.custom_id: job.batch_id for job in find_jobs(db, JobFilter())}
    assert ids == {"a1": first, "a2": first, "b1": second, "b2": second}
    failed = JobFilter(states=frozenset({JobState.FAILED}))
    assert sorted(job.custom_id for job in find_jobs(db, failed)) == ["a2", "b1"]
    assert [job.custom_id for job in find_jobs(db, JobFilter(model="other"))] == ["b1", "b2"]
    assert [job.custom_id for job in find_jobs(db, JobFilter(model="other"), batch_id=first)] == []
    assert list(find_jobs(db, JobFilter(since=START + 1))) == []
    assert len(list(find_jobs(db, JobFilter(since=START)))) == 4


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("prompt=x", "no column 'prompt'; there are: custom_id, line, model"),
        ("rounds=many", "rounds 'many': expected a whole number"),
        ("rounds=1" + "0" * 30, "expected a whole number"),
        ("ttft_s>nan", "expected a number"),
        ("started_at>yesterday", "expected Unix seconds, or a date"),
        ("state=running", "results are of jobs that are cancelled, completed, expired, failed"),
        ("rounds", "expected COLUMN=VALUE"),
        ("rounds<", "< needs a value"),
    ],
)
def test_a_condition_that_cannot_be_met_is_refused(condition: str, message: str) -> None:
    with pytest.raises(FilterInvalid, match=re.escape(message)):
        Condition.parse(condition)


def test_percentiles_are_those_of_the_statistics_module(db: Database) -> None:
    batch = fill(db, [None if n == 7 else f"text {n}" for n in range(1, 30)])
    spread = distribution(db, batch)
    expected = statistics.quantiles([0.1 * n for n in range(1, 30) if n != 7], n=100, method="inclusive")
    measured = spread.percentiles["ttft_s"]
    assert measured.num_jobs == 28
    assert [measured.p50, measured.p90, measured.p99] == pytest.approx([expected[n] for n in (49, 89, 98)])
    assert spread.percentiles["e2e_s"].p99 == pytest.approx(2.0)
    assert spread.other_s == pytest.approx(28 * 0.6)
    assert spread.finish_reasons == {"stop": 28}
    assert spread.errors == {"context_length_exceeded": 1}


def test_a_batch_that_measured_nothing_has_no_percentiles(db: Database) -> None:
    spread = distribution(db, fill(db, [None]))
    assert spread.percentiles == {}
    assert spread.other_s == 0.0


def test_a_job_whose_parts_overlap_takes_nothing_from_the_other_jobs_unexplained_time(db: Database) -> None:
    batch = fill(db, ["one", "two", "three"])
    with db.write() as connection:
        connection.execute(text("UPDATE job SET link_s = 9.0 WHERE custom_id = 'c1'"))
        connection.execute(text("UPDATE job SET draft_s = NULL WHERE custom_id = 'c2'"))
    assert distribution(db, batch).other_s == pytest.approx(0.0 + 0.8 + 0.6)


def test_batches_are_compared_over_many_pages(db: Database) -> None:
    texts: list[str | None] = [f"text {n}" for n in range(1, 451)]
    a, b = fill(db, texts), fill(db, [*texts[:419], "text 42x", None])
    key = shared_key(db, a, b)
    assert key == "custom_id"
    compared = list(pairs(db, a, b, key))
    assert [pair.a.custom_id for pair in compared] == [f"c{n}" for n in range(1, 422)]
    assert all(pair.same_prompt and pair.a.custom_id == pair.b.custom_id for pair in compared)
    (different,) = [pair for pair in compared[:-1] if first_difference(pair.a, pair.b)]
    difference = first_difference(different.a, different.b)
    assert difference is not None
    assert (different.a.line, difference.token, difference.character) == (420, 7, 7)
    assert only_in(db, a, b, key, limit=2) == (29, ["c422", "c423"])
    assert only_in(db, b, a, key, limit=2) == (0, [])


def test_batches_without_a_common_custom_id_are_matched_by_line(db: Database) -> None:
    a, b = fill(db, ["one", "two"], prefix="a"), fill(db, ["one", "2"], prefix="b", prompt="another")
    key = shared_key(db, a, b)
    assert key == "line"
    compared = list(pairs(db, a, b, key))
    assert [(pair.a.custom_id, pair.b.custom_id, pair.same_prompt) for pair in compared] == [
        ("a1", "b1", False),
        ("a2", "b2", False),
    ]


def test_the_request_of_a_job_is_found(db: Database) -> None:
    batch = fill(db, ["one"])
    assert request_of(db, f"{batch}-1") == '{"prompt": "prompt 1", "seed": 7}'
    with pytest.raises(JobNotFound):
        request_of(db, f"{batch}-2")


def test_the_documented_queries_answer(db: Database) -> None:
    batch = fill(db, ["one", None, LONG])
    assert len(QUERIES) == 5
    with db.read() as connection:
        waits, days, times, errors, wire = [connection.execute(text(query)).mappings().all() for query in QUERIES]
    assert [row["custom_id"] for row in waits] == ["c3", "c1"]
    assert [(row["day"], row["jobs"], row["tokens"]) for row in days] == [(START // 86400, 2, 3 + len(LONG))]
    assert [(row["id"], row["tokens_per_round"], row["acceptance"]) for row in times] == [(batch, 2.5, 0.5)]
    assert [(row["error_type"], row["jobs"]) for row in errors] == [("context_length_exceeded", 1)]
    assert [(row["head"], round(row["bytes_per_token"])) for row in wire] == [("h1", 2200 // (3 + len(LONG)))]
