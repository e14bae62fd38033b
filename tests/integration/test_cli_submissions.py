"""`submit`: urgency, deadlines, stored results, and what a killed submission leaves."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pyarrow import parquet

from cli.errors import ExitCode
from cli.processes import child_environment, shardq_argv
from storage.batches import list_batches
from storage.states import BatchStatus, JobState
from tasks import keys
from tasks.heads import register_profile
from tasks.queues import num_waiting
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of, numbered

GREEDY = b'{"custom_id": "a", "prompt": "one", "temperature": 0}\n{"custom_id": "b", "prompt": "two", "seed": 3}\n'


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        register_profile(connection, "tiny", PROFILE)
        yield connection


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


def test_a_batch_is_as_urgent_as_it_was_said_to_be(run: Shardq, client: redis.Redis) -> None:
    usual, urgent = run.submit(), run.submit(PROMPTS, "--priority", "0")
    assert (run.status(usual)["priority"], run.status(urgent)["priority"]) == (5, 0)
    assert client.llen(keys.ready_at(keys.queue("tiny"), 0)) == 2
    assert "priority       0" in run("status", urgent).stdout


def test_a_name_that_hides_a_job_or_looks_like_an_id_is_refused(run: Shardq) -> None:
    batch = run.submit(PROMPTS, "--name", "nightly")
    for name, message in (
        ("nightly-1", f"means line 1 of {batch}"),
        (f"{batch}-2", "ids begin with batch_"),
        (batch, "ids begin with batch_"),
    ):
        result = run("submit", "--name", name, "-", stdin=PROMPTS)
        assert result.exit_code == ExitCode.ERROR
        assert message in error_of(result)
    for name in ("nightly-3", "nightly-1b", "nightly"):  # no third line; no job; the same batch again
        assert run("submit", "--name", name, "-", stdin=PROMPTS).exit_code == ExitCode.OK


@pytest.mark.parametrize("value", ["10", "-1", "high"])
def test_an_urgency_that_does_not_exist_is_wrong_usage(run: Shardq, value: str) -> None:
    result = run("submit", "--priority", value, "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "--priority" in error_of(result)


@pytest.mark.parametrize("option", ["--expires-in", "--completion-window"])
def test_a_batch_expires_when_it_was_told_to(run: Shardq, option: str) -> None:
    shown = run.status(run.submit(PROMPTS, option, "24h"))
    assert shown["completion_window"] == "24h"
    assert shown["expires_at"] - shown["created_at"] in (86_400, 86_401)


def test_a_duration_that_is_none_is_wrong_usage(run: Shardq) -> None:
    result = run("submit", "--expires-in", "soon", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "expected a duration such as 90s, 10m, 2h or 7d" in error_of(result)


def test_a_line_with_a_deadline_of_its_own_expires_alone(run: Shardq) -> None:
    data = b'{"custom_id": "a", "prompt": "one", "expires_in": "10m"}\n{"custom_id": "b", "prompt": "two"}\n'
    batch = run.submit(data)
    with run.database() as database, database.read() as connection:
        rows = connection.exec_driver_sql("SELECT custom_id, expires_at FROM job ORDER BY line").all()
    assert rows[0][1] == pytest.approx(time.time() + 600, abs=60)
    assert rows[1][1] is None
    assert run.status(batch)["expires_at"] is None


def test_the_batch_object_has_every_field_of_openais_and_whole_seconds(run: Shardq) -> None:
    batch = run.submit(PROMPTS, "--name", "nightly", "--expires-in", "2h")
    run.end_jobs(batch, a=JobState.FAILED)
    shown = run.status(batch)
    assert (shown["object"], shown["status"], shown["endpoint"]) == ("batch", "completed", "/v1/completions")
    assert shown["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert shown["usage"]["output_tokens"] == 3
    assert shown["metadata"] == {"name": "nightly"}
    assert shown["errors"] is None
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        assert shown[name].startswith("file-")
    for name in ("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"):
        assert isinstance(shown[name], int), name
    for name in ("failed_at", "expired_at", "cancelling_at", "cancelled_at"):
        assert shown[name] is None


def test_stored_results_are_taken_without_a_head(run: Shardq, client: redis.Redis) -> None:
    run.end_jobs(first := run.submit(GREEDY))
    client.delete(*keys.ready("tiny"))
    result = run("submit", "--reuse", "-", stdin=GREEDY)
    assert result.exit_code == ExitCode.OK, result.stderr
    batch = result.stdout.strip()
    assert "2 of 2 jobs had a stored result" in result.stderr
    assert f"`shardq results {batch}`" in result.stderr
    assert num_waiting(client, "tiny") == 0
    assert run("status", batch).exit_code == ExitCode.OK
    lines = [json.loads(line) for line in run("results", batch).stdout.splitlines()]
    assert [line["shardq"]["reused_from"] for line in lines] == [f"{first}-1", f"{first}-2"]
    assert lines[0]["response"]["body"]["choices"][0]["text"] == "Größe,\nzwei"


def test_waiting_for_stored_results_returns_at_once(run: Shardq) -> None:
    run.end_jobs(run.submit(GREEDY))
    result = run("submit", "--reuse", "--wait", "-", stdin=GREEDY)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "reused         2" in result.stdout


def test_only_the_same_request_is_reused_and_only_if_asked_for(run: Shardq) -> None:
    run.end_jobs(run.submit(GREEDY))
    assert run.status(run.submit(GREEDY))["job_counts"]["completed"] == 0
    other = GREEDY.replace(b"one", b"uno").replace(b'"seed": 3', b'"seed": 4')
    assert run.status(run.submit(other, "--reuse"))["job_counts"]["completed"] == 0


def test_submitting_again_says_what_stays_as_it_was(run: Shardq) -> None:
    first = run.submit(PROMPTS, "--name", "nightly")
    run.end_jobs(first, a=JobState.FAILED)
    again = run("submit", "--name", "nightly", "--priority", "1", "-", stdin=PROMPTS)
    assert again.stdout.strip() == first
    assert "its priority stays 5" in again.stderr
    assert f"`shardq retry {first}`" in again.stderr


def test_a_name_that_is_taken_comes_with_the_ways_out(run: Shardq) -> None:
    run.submit(PROMPTS, "--name", "nightly")
    message = error_of(run("submit", "--name", "nightly", "-", stdin=numbered(1)))
    assert "--name" in message
    assert "`shardq delete nightly`" in message


def killed(*_: object, **__: object) -> None:
    raise SystemExit(9)


def wait_until_half_written(run: Shardq) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with run.database() as database:
            if any(row.counts.total for row in list_batches(database, statuses=[BatchStatus.VALIDATING])):
                return
        time.sleep(0.005)
    raise AssertionError("nothing was written")


def test_a_killed_submission_leaves_nothing_that_runs_and_is_done_again_by_the_same_command(
    run: Shardq, client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    count = 20_000
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(numbered(count))
    command = ("submit", str(path), "--name", "nightly", "--priority", "2", "--expires-in", "1h")
    with run.database():
        pass  # the tables are there
    environment = child_environment({"SHARDQ_DATA_DIR": str(run.data_dir), "SHARDQ_BROKER_URL": redis_url})
    environment["SHARDQ_DATABASE_URL"] = run.database_url
    process = subprocess.Popen(shardq_argv(*command), env=environment, stdout=subprocess.PIPE, text=True)
    wait_until_half_written(run)
    process.kill()
    out, _ = process.communicate()
    assert out == ""
    cut_off = run.status("nightly")
    assert cut_off["status"] == "validating"
    assert 0 < cut_off["request_counts"]["total"] < count
    assert client.llen(keys.ready_at(keys.queue("tiny"), 2)) == 0
    assert "submit it again" in run("status", "nightly").stdout

    again = run(*command)
    assert again.exit_code == ExitCode.OK, again.stderr
    assert again.stdout.strip() == cut_off["id"]
    assert "was cut off" in again.stderr
    whole = run.status("nightly")
    assert (whole["status"], whole["request_counts"]["total"], whole["priority"]) == ("in_progress", count, 2)
    with run.database() as database, database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(DISTINCT line) FROM job").scalar_one() == count
    assert client.llen(keys.ready_at(keys.queue("tiny"), 2)) > 0


def test_a_submission_that_was_cut_off_and_then_cancelled_names_a_way_that_works(
    run: Shardq, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cli.client.submission.publish_batch", killed)
        patch.setattr("cli.client.submission.discard_batch", lambda *_: None)
        assert run("submit", "--name", "big", "-", stdin=PROMPTS).exit_code == 9
    assert f"cut off (submit it again, or `shardq delete {run.status('big')['id']}`)" in run("list").stderr
    run("cancel", "big")
    batch = run.status("big")["id"]
    partly = f"not all of its file was written (`shardq delete {batch}`, then submit it again)"
    assert f"cancelled: {partly}" in run("status", "big").stdout
    assert run("list").stderr == f"{batch} is cancelled: {partly}\n"
    assert f"`shardq delete {batch}`, then submit" in run("follow", f"{batch}-1").stderr
    assert f"`shardq delete {batch}`, then submit" in error_of(run("retry", "big", "--cancelled"))
    refusal = error_of(run("submit", "--name", "big", "-", stdin=PROMPTS))
    assert "`shardq delete big` first, or give another --name" in refusal
    assert "retry" not in refusal
    assert run("delete", "big", "--yes").exit_code == ExitCode.OK
    assert run.status(run.submit(PROMPTS, "--name", "big"))["status"] == "in_progress"


def test_the_end_of_a_resumed_submission_counts_from_then(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cli.client.submission.publish_batch", killed)
        patch.setattr("cli.client.submission.discard_batch", lambda *_: None)
        assert run("submit", "--name", "x", "--expires-in", "1", "-", stdin=PROMPTS).exit_code == 9
    before = time.time()
    batch = run.submit(PROMPTS, "--name", "x", "--expires-in", "1h", "--priority", "1")
    shown = run.status(batch)
    assert shown["expires_at"] >= before + 3599
    assert shown["priority"] == 1


CHAT = [{"role": "user", "content": "hi"}]
#: a prompt, token ids and a chat; notes of two kinds
WITH_NOTES = b"".join(
    json.dumps(line).encode() + b"\n"
    for line in (
        {"id": "a", "prompt": "one\nline", "metadata": {"source": "x\u2028y", "page": 3}},
        {"id": "b", "prompt": [1, 2]},
        {"id": "c", "messages": CHAT, "metadata": {"source": "z"}},
    )
)
NOTES = [{"source": "x\u2028y", "page": 3}, None, {"source": "z"}]


@pytest.fixture
def noted(run: Shardq) -> str:
    """An ended batch of `WITH_NOTES`, the last job failed."""
    batch = run.submit(WITH_NOTES, "--name", "noted")
    run.end_jobs(batch, c=JobState.FAILED)
    return batch


def test_results_have_the_notes_of_their_lines_and_the_input_if_asked_for(run: Shardq, noted: str) -> None:
    plain = [json.loads(line) for line in run("results", noted, "--json").stdout.splitlines()]
    assert [line.get("shardq", {}).get("metadata") for line in plain] == NOTES
    assert "prompt" not in plain[0]["shardq"]
    asked = [json.loads(line)["shardq"] for line in run("results", noted, "--json", "--with-input").stdout.splitlines()]
    assert [line.get("prompt") for line in asked] == ["one\nline", [1, 2], None]
    assert [line.get("messages") for line in asked] == [None, None, CHAT]
    assert json.loads(run("show", "noted-1", "--json").stdout)["metadata"] == NOTES[0]
    assert "source=z" in run("show", "noted-3").stdout


def test_inputs_stand_in_tables_beside_the_results(run: Shardq, noted: str, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("results", noted, "--format", "csv", "--with-input").stdout)))
    assert [row["prompt"] for row in rows] == ["one\nline", "[1, 2]", ""]
    assert [json.loads(row["metadata"] or "null") for row in rows] == NOTES
    path = tmp_path / "r.parquet"
    assert run("results", noted, "--output", str(path), "--with-input").exit_code == ExitCode.JOBS_FAILED
    table = parquet.read_table(path).to_pylist()
    assert [row["prompt"] for row in table] == ["one\nline", "[1, 2]", None]
    assert json.loads(table[2]["messages"]) == CHAT
    chosen = run("results", noted, "--columns", "custom_id,prompt,messages", "--json").stdout.splitlines()
    assert json.loads(chosen[2]) == {"custom_id": "c", "prompt": None, "messages": CHAT}
    assert "--columns in a table" in error_of(run("results", noted, "--format", "table", "--with-input"))
    table_text = run("results", noted, "--format", "table", "--columns", "custom_id,metadata").stdout
    assert '{"source": "z"}' in table_text


def test_a_batch_keeps_the_notes_about_it(run: Shardq) -> None:
    batch = run.submit(PROMPTS, "--metadata", "owner=ann", "--metadata", "run=a=b", "--name", "nightly")
    assert run.status(batch)["metadata"] == {"name": "nightly", "owner": "ann", "run": "a=b"}
    assert "owner=ann, run=a=b" in run("status", batch).stdout
    assert "owner=ann, run=a=b" in run("list", COLUMNS="120").stdout
    assert batch in run("list", COLUMNS="60").stdout
    again = run("submit", "--name", "nightly", "--metadata", "owner=bob", "-", stdin=PROMPTS)
    assert "its metadata stays as it is" in again.stderr


@pytest.mark.parametrize("note", ["owner", "=ann", f"{'k' * 65}=x", f"k={'x' * 513}"])
def test_a_note_that_typed_clients_refuse_is_wrong_usage(run: Shardq, note: str) -> None:
    result = run("submit", "--metadata", note, "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "is not KEY=VALUE" in error_of(result) or "metadata: expected a key of 1 to 64" in error_of(result)


@pytest.mark.parametrize("name", ["r.xlsx", "r.txt", "r.json"])
def test_an_ending_that_names_no_format_is_refused(run: Shardq, noted: str, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for command in (["results", noted], ["submit", "--wait", "-"]):
        result = run(*command, "--output", str(path), stdin=PROMPTS)
        assert result.exit_code == ExitCode.USAGE
        assert "expected a name that ends in .jsonl, .csv or .parquet" in error_of(result)
        assert not path.exists()
    assert run("results", noted, "--format", "csv", "--output", str(path)).exit_code == ExitCode.JOBS_FAILED
    assert path.read_text().startswith("custom_id,")


def test_the_ids_of_a_batchs_files_lead_to_its_results(run: Shardq, noted: str) -> None:
    shown = run.status(noted)
    assert shown["endpoint"] == "/v1/completions"  # the first line's
    lines = {name: run("results", shown[name], "--json").stdout for name in ("output_file_id", "error_file_id")}
    assert [json.loads(line)["custom_id"] for line in lines["output_file_id"].splitlines()] == ["a", "b"]
    assert [json.loads(line)["error"]["message"] for line in lines["error_file_id"].splitlines()] == ["too long"]


def test_csv_for_excel_begins_with_a_byte_order_mark(run: Shardq, noted: str) -> None:
    assert run("results", noted, "--format", "csv", "--bom").stdout_bytes.startswith(b"\xef\xbb\xbfcustom_id,")
    assert run("results", noted, "--format", "csv").stdout_bytes.startswith(b"custom_id,")
    assert "--bom is for csv" in error_of(run("results", noted, "--json", "--bom"))


def test_the_same_file_again_without_a_name_is_remarked_upon(run: Shardq) -> None:
    first = run.submit(PROMPTS, "--name", "nightly")
    again = run("submit", "-", stdin=PROMPTS)
    assert again.exit_code == ExitCode.OK
    assert f"same content as {first} (nightly), submitted " in again.stderr
    assert "same content" not in run("submit", "--name", "other", "-", stdin=PROMPTS).stderr
    assert "same content" not in run("submit", "-", stdin=b'{"prompt": "new"}').stderr


def test_what_cannot_be_told_of_a_queued_batch_makes_no_script_submit_it_again(
    run: Shardq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cli.commands.submit.print_json", full)
    result = run("submit", "--json", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.UNFINISHED
    (batch,) = json.loads(run("list", "--json").stdout)
    assert f"No space left on device; the batch is queued: `shardq status {batch['id']}`" in result.stderr


def test_lines_left_out_are_seen_at_the_end(run: Shardq, tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    words = ["submit", "--wait", "--reuse", "--on-invalid", "skip", "--errors", str(errors), "-"]
    run.end_jobs(run.submit(GREEDY))
    assert run(*words, stdin=GREEDY).exit_code == ExitCode.OK
    result = run(*words, stdin=GREEDY + b"{oops\n")
    assert result.exit_code == ExitCode.JOBS_FAILED
    assert "left out       1 line of the file, in no result (`submit --errors FILE` names them)" in result.stdout
    assert [json.loads(line)["line"] for line in errors.read_text().splitlines()] == [3]
