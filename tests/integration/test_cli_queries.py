"""The commands that ask stored results, against a real database."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from cli.errors import ExitCode
from cli.result_files import ROW_GROUP
from storage.database import Database
from tests.cli_runner import Shardq, error_of
from tests.filled_database import START, fill

TEXTS = ["The capital of France is Paris.", 'Größe,\n"zwei"', None]


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    """With the batches `nightly` and `nightly-int8`, which differ in their first text and in a fourth job."""
    shardq = Shardq(tmp_path / "data", {})
    with Database.open(shardq.database_url, clock=lambda: START) as database:
        fill(database, list(TEXTS), name="nightly")
        fill(database, ["The capital of France is Lyon.", *TEXTS[1:], "more"], name="nightly-int8", model="int8")
    return shardq


def ids(stdout: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in stdout.splitlines()]


#: what no Latin-1 has, what ends a line for some readers, and half a character
ODD = "“a”\u2028b\u2029c\x85d \ud800"


def test_programs_read_utf8_line_by_line_whatever_the_locale(tmp_path: Path) -> None:
    run = Shardq(tmp_path / "data", {}, charset="latin-1")
    with Database.open(run.database_url, clock=lambda: START) as database:
        fill(database, [ODD, ODD], name="nightly")
    lines = run("results", "nightly", "--json").stdout_bytes.decode().splitlines()
    texts = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines]
    assert texts == [ODD, ODD]
    follow = run("follow", "nightly-1", "--json").stdout_bytes.decode().splitlines()
    assert json.loads(follow[0])["text"] == ODD
    rows = csv.reader(io.StringIO(run("results", "nightly", "--format", "csv").stdout_bytes.decode(), newline=""))
    assert [row[0] for row in rows] == ["custom_id", "c1", "c2"]
    shown = json.loads(run("show", "nightly-1", "--json").stdout_bytes.decode())
    assert shown["text"] == ODD


@pytest.mark.parametrize("charset", ["latin-1", "gb2312"])
@pytest.mark.parametrize("command", [["status"], ["list"], ["show", "nightly-1"], ["results", "nightly"], ["stats"]])
def test_people_read_question_marks_where_their_locale_lacks_a_character(
    tmp_path: Path, charset: str, command: list[str]
) -> None:
    run = Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": "redis://127.0.0.1:1/0"}, charset)
    with Database.open(run.database_url, clock=lambda: START) as database:
        fill(database, [ODD, None], name="nightly")
    words = [*command, "nightly"] if command == ["stats"] else command
    result = run(*words, *(["--format", "table"] if command[0] == "results" else []))
    assert result.exit_code in (ExitCode.OK, ExitCode.JOBS_FAILED), result.stderr
    assert result.stdout_bytes.decode(charset)


def test_results_are_filtered_within_a_batch_and_across_all(run: Shardq) -> None:
    assert ids(run("results", "nightly", "--failed").stdout) == ["c3"]
    assert ids(run("results", "--where", "finish_reason=length").stdout) == ["c1", "c1"]
    assert ids(run("results", "--model", "int8", "--where", "text=more").stdout) == ["c4"]
    assert sorted(ids(run("results", "--since", "2023-11-01").stdout)) == ["c1", "c1", "c2", "c2", "c3", "c3", "c4"]
    recent = run("results", "--since", "1h")
    assert (recent.stdout, recent.exit_code) == ("", ExitCode.OK)
    assert run("results", "nightly").exit_code == ExitCode.JOBS_FAILED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--failed, --model, --since or --where"),
        (["--where", "colour=red"], "there are: custom_id, line"),
        (["nightly", "--columns", ","], "'--columns': ',' names no column"),
        (["nightly", "--columns", ""], "'--columns': '' names no column"),
        (["nightly", "--columns", "id,colour"], "no column 'colour'; there are: custom_id"),
        (["--since", "tomorrow"], "expected a duration such as 90s"),
    ],
)
def test_a_filter_nobody_can_apply_is_one_line(run: Shardq, arguments: list[str], message: str) -> None:
    result = run("results", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert message in error_of(result)


def test_columns_are_shown_in_the_order_asked_for(run: Shardq) -> None:
    (line,) = run("results", "nightly", "--columns", "rounds,text,head", "--where", "line=2").stdout.splitlines()
    assert list(json.loads(line).items()) == [("rounds", 4), ("text", TEXTS[1]), ("head", "h1")]
    table = run("results", "nightly", "--columns", "custom_id,ttft_s,num_choices", "--format", "table").stdout
    assert [row.split() for row in table.splitlines()] == [
        ["CUSTOM_ID", "TTFT_S", "NUM_CHOICES"],
        ["c1", "0.1", "1"],
        ["c2", "0.2", "1"],
        ["c3", "–", "1"],
    ]


def test_a_dash_is_stdout_for_results_and_errors(run: Shardq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    assert ids(run("results", "nightly", "--output", "-").stdout) == ["c1", "c2", "c3"]
    assert ids(run("results", "nightly", "--output", "-", "--errors", "-").stdout) == ["c1", "c2", "c3"]
    assert ids(run("results", "nightly", "--output", "done.jsonl", "--errors", "-").stdout) == ["c3"]
    assert "--output FILE.parquet" in error_of(run("results", "nightly", "--output", "-", "--format", "parquet"))
    assert [path.name for path in folder.iterdir()] == ["done.jsonl"]


def test_results_and_errors_are_refused_in_one_file(run: Shardq, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = run("results", "nightly", "--output", str(path), "--errors", str(path))
    assert result.exit_code == ExitCode.USAGE
    assert "--output and --errors are the same file" in error_of(result)
    assert not path.exists()


def test_an_error_file_that_cannot_be_written_names_its_option(run: Shardq, tmp_path: Path) -> None:
    result = run("results", "nightly", "--errors", str(tmp_path / "no" / "errors.jsonl"))
    assert "(--errors names another place)" in error_of(result)


@pytest.mark.parametrize(
    "command",
    [
        *["--help", "results --help", "list", "show nightly-1", "stats nightly", "status nightly"],
        *["results nightly", "results nightly --format table", "results nightly --format csv", "results nightly -o -"],
        *["compare nightly nightly-int8", "report nightly -o -", "doctor"],
    ],
)
def test_every_command_ends_alike_and_quietly_when_its_reader_has_left(run: Shardq, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "SHARDQ_DATA_DIR": str(run.data_dir)}
    argv = [sys.executable, "-m", "cli.main", *command.split()]
    left = subprocess.run(argv, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (left.returncode, left.stderr) == (ExitCode.READER_LEFT, "")


def test_an_error_that_nobody_reads_ends_alike(run: Shardq) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "SHARDQ_DATA_DIR": str(run.data_dir)}
    argv = [sys.executable, "-m", "cli.main", "results", "nothing"]
    left = subprocess.run(argv, env=environment, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert left.returncode == ExitCode.READER_LEFT


def test_csv_keeps_whole_numbers_times_and_empty_places(run: Shardq) -> None:
    out = run("results", "nightly", "--format", "csv").stdout
    first, second, third = csv.DictReader(io.StringIO(out))
    assert (first["rounds"], first["started_at"], first["state"]) == ("4", str(START + 1), "completed")
    assert second["text"] == TEXTS[1]
    assert (third["rounds"], third["ttft_s"], third["error_message"]) == ("", "", "too long")


def test_parquet_has_whole_numbers_beside_none_and_timestamps(run: Shardq, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    result = run("results", "nightly", "--output", str(path))
    assert result.exit_code == ExitCode.JOBS_FAILED, result.output
    table = parquet.read_table(path)
    assert table.schema.field("rounds").type == pyarrow.int64()
    assert table.schema.field("ttft_s").type == pyarrow.float64()
    assert table["rounds"].to_pylist() == [4, 4, None]
    assert table["started_at"].to_pylist()[:2] == [datetime.fromtimestamp(START + n, UTC) for n in (1, 2)]
    assert table["text"].to_pylist() == TEXTS
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["out.parquet"]


def test_parquet_is_written_in_row_groups(run: Shardq, tmp_path: Path) -> None:
    with run.database() as database:
        fill(database, ["x"] * (ROW_GROUP + 1), name="large")
    path = tmp_path / "out.parquet"
    assert run("results", "large", "-o", str(path), "--columns", "line,text").exit_code == ExitCode.OK
    written = parquet.ParquetFile(path)
    assert [written.metadata.row_group(n).num_rows for n in range(written.num_row_groups)] == [ROW_GROUP, 1]
    assert written.read()["line"].to_pylist() == list(range(1, ROW_GROUP + 2))


def test_parquet_without_its_package_or_a_file_says_what_to_do(
    run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--output FILE.parquet" in error_of(run("results", "nightly", "--format", "parquet"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("results", "nightly", "--output", str(tmp_path / "out.parquet"))
    assert "pip install 'shardq[parquet]'" in error_of(result)
    assert not (tmp_path / "out.parquet").exists()


def test_show_has_every_figure_of_a_job(run: Shardq) -> None:
    shown = json.loads(run("show", "nightly-2", "--json").stdout)
    assert shown["request"] == {"prompt": "prompt 2", "seed": 7}
    assert (shown["text"], shown["error"], shown["queue_s"]) == (TEXTS[1], None, 2.0)
    seconds = {name: part["seconds"] for name, part in shown["time_spent"].items()}
    expected = {"queue": 2.0, "draft": 0.2, "head": 0.3, "link": 0.4, "tail": 0.5, "other": 0.6}
    assert seconds == pytest.approx(expected)
    assert sum(part["share"] for part in shown["time_spent"].values()) == pytest.approx(1.0)
    text = run("show", "nightly-2").stdout
    assert all(part in text for part in ('"prompt": "prompt 2"', "  Größe,\n", "50%", "13 completion", "after 0.200 s"))


def test_show_of_a_failed_job_says_why_and_of_a_batch_what_to_type(run: Shardq) -> None:
    assert "context_length_exceeded: too long" in run("show", "nightly-3").stdout
    assert "shardq stats nightly" in error_of(run("show", "nightly"))
    assert "no job" in error_of(run("show", "nightly-9"))


def test_stats_tell_percentiles_times_ends_and_errors(run: Shardq) -> None:
    shown = json.loads(run("stats", "nightly", "--json").stdout)
    assert shown["percentiles"]["ttft_s"] == pytest.approx({"num_jobs": 2, "p50": 0.15, "p90": 0.19, "p99": 0.199})
    assert shown["time_spent"]["tail"] == pytest.approx({"seconds": 1.0, "share": 1.0 / 7.0})
    assert shown["time_spent"]["other"]["seconds"] == pytest.approx(1.2)
    assert shown["finish_reasons"] == {"length": 1, "stop": 1}
    assert shown["errors"] == {"context_length_exceeded": 1}
    text = run("stats", "nightly").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "first token, s" in text
    assert "1 context_length_exceeded" in text


def test_compare_says_which_texts_differ_and_where_first(run: Shardq) -> None:
    result = run("compare", "nightly", "nightly-int8", "--json")
    assert result.exit_code == ExitCode.JOBS_FAILED
    shown = json.loads(result.stdout)
    assert shown["pairs"] == {"same": 1, "different": 1, "incomplete": 1}
    assert (shown["only_in_a"]["number"], shown["only_in_b"]) == (0, {"number": 1, "first": ["c4"]})
    (difference,) = shown["differences"]
    assert (difference["custom_id"], difference["token"], difference["character"]) == ("c1", 25, 25)
    assert difference["around_b"] == "al of France is Lyon."
    assert shown["a"]["speed"]["ttft_s_p50"] == pytest.approx(0.15)
    text = run("compare", "nightly", "nightly-int8").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "only in B: 1 job, c4" in text


def test_what_people_read_steers_no_terminal_and_files_keep_every_character(run: Shardq) -> None:
    wild = "\x1b[31mred\x1b[0m\n\x7f\x9b"
    with run.database() as database:
        a, b = (fill(database, [f"{name} {wild}", None], name=f"{name}{wild}", prefix=wild) for name in "ab")
        with database.write() as connection:
            connection.exec_driver_sql("UPDATE job SET error_message = ? WHERE error_message IS NOT NULL", (wild,))
    calls = [
        *(("results", a, "--format", "table"), ("show", f"{a}-1"), ("show", f"{a}-2"), ("follow", f"{a}-2")),
        *(("compare", a, b), ("list",), ("status", a), ("stats", a), ("status", f"no {wild}")),
        ("prune", "--older-than", "1d", "--dry-run"),
    ]
    shown = [run(*call) for call in calls]
    for result in shown:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.output), result.output
    table = shown[0].stdout.splitlines()
    assert len(table) == 3
    assert table[1].startswith(r"\x1b[31mre…")
    assert r"custom_id      \x1b[31mred\x1b[0m\n\x7f\x9b1" in shown[1].stdout.splitlines()
    assert r"error          context_length_exceeded: \x1b[31mred\x1b[0m\n\x7f\x9b" in shown[2].stdout.splitlines()
    assert ids(run("results", a).stdout)[0] == f"{wild}1"
    rows = list(csv.DictReader(io.StringIO(run("results", a, "--format", "csv").stdout, newline="")))
    assert (rows[0]["custom_id"], rows[0]["text"]) == (f"{wild}1", f"a {wild}")


def test_batches_with_the_same_texts_compare_as_the_same(run: Shardq) -> None:
    with run.database() as database:
        fill(database, ["one", "two"], name="a")
        fill(database, ["one", "two"], name="b")
    result = run("compare", "a", "b")
    assert result.exit_code == ExitCode.OK
    assert "2 pairs by custom_id: 2 with the same text, 0 different" in result.stdout
    assert "the same batch" in error_of(run("compare", "a", "a"))
