"""The batch commands against a real queue server and a real database."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from cli.errors import ExitCode
from relay.keys import new_tail_id
from relay.streams import RedisRelay
from relay.transport import TailInfo
from storage.states import JobState
from tasks import keys
from tasks.feeder import feed_once
from tasks.heads import register_profile
from tasks.queues import num_waiting
from tasks.settings import BookkeeperSettings
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of
from tests.redis_server import running_redis


@pytest.fixture
def run(tmp_path: Path, redis_url: str) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def served(client: redis.Redis) -> str:
    register_profile(client, "tiny", PROFILE)
    return "tiny"


def end_jobs(run: Shardq, batch: str, *failing: str) -> None:
    run.end_jobs(batch, **dict.fromkeys(failing, JobState.FAILED))


def submit(run: Shardq, data: bytes = PROMPTS, *options: str) -> str:
    return run.submit(data, *options)


def test_a_submitted_file_stands_in_the_queue_when_the_command_returns(
    run: Shardq, served: str, client: redis.Redis
) -> None:
    batch = submit(run)
    assert batch.startswith("batch_")
    assert num_waiting(client, served) == 2


def test_a_file_and_stdin_are_the_same(run: Shardq, served: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(PROMPTS)
    result = run("submit", str(path), "--json")
    assert result.exit_code == ExitCode.OK
    assert json.loads(result.stdout)["request_counts"] == {"total": 2, "completed": 0, "failed": 0}


def test_nothing_is_queued_for_a_file_with_a_bad_line(run: Shardq, served: str, client: redis.Redis) -> None:
    result = run("submit", "-", stdin=PROMPTS + b"oops\n")
    assert result.exit_code == ExitCode.USAGE
    assert num_waiting(client, served) == 0
    assert json.loads(run("list", "--json").stdout) == []


def test_invalid_lines_are_left_out_and_counted(run: Shardq, served: str) -> None:
    batch = submit(run, PROMPTS + b"oops\n", "--on-invalid", "skip")
    status = json.loads(run("status", batch, "--json").stdout)
    assert status["num_invalid_lines"] == 1
    assert status["request_counts"]["total"] == 2


def test_an_unknown_model_is_refused_with_the_served_ones(run: Shardq, served: str) -> None:
    result = run("submit", "-", stdin=b'{"prompt": "a"}\n{"prompt": "b", "model": "huge"}\n')
    assert result.exit_code == ExitCode.USAGE
    assert error_of(result) == "Error: line 2: model: 'huge' is not served; served are: tiny"
    assert result.stderr.splitlines()[1:] == [
        "`--map-model huge=tiny` sends its lines to tiny, `--any-model` all lines; "
        "`--expect-model huge` waits for a head that serves it"
    ]
    assert json.loads(run("list", "--json").stdout) == []


def test_lines_with_an_unknown_model_can_be_left_out(run: Shardq, served: str) -> None:
    batch = submit(run, b'{"prompt": "a"}\n{"prompt": "b", "model": "huge"}\n', "--on-invalid", "skip")
    assert json.loads(run("status", batch, "--json").stdout)["num_invalid_lines"] == 1


def test_an_unknown_model_as_an_option_is_refused(run: Shardq, served: str) -> None:
    result = run("submit", "--model", "huge", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "'huge' is not served" in error_of(result)
    # an option's name is mapped no further
    assert result.stderr.splitlines()[1:] == ["`--expect-model huge` waits for a head that serves it"]


#: as made for OpenAI
NAMED = (
    b'{"custom_id": "a", "prompt": "x", "model": "gpt-4o"}\n{"custom_id": "b", "prompt": "x", "model": "gpt-4o-mini"}\n'
)


def models_of(run: Shardq, batch: str) -> dict[str, str]:
    return {name: job.model for name, job in run.jobs(batch).items()}


def test_names_of_other_services_are_taken_for_served_ones(run: Shardq, served: str, client: redis.Redis) -> None:
    register_profile(client, "other", PROFILE)
    batch = submit(run, NAMED, "--map-model", "gpt-4o=tiny", "--map-model", "gpt-4o-mini=other")
    assert models_of(run, batch) == {"a": "tiny", "b": "other"}
    assert run.status(batch)["parameters"] == {"map_model": {"gpt-4o": "tiny", "gpt-4o-mini": "other"}}
    every = submit(run, NAMED, "--any-model", "--model", "other")
    assert models_of(run, every) == {"a": "other", "b": "other"}
    assert run.status(every)["parameters"] == {"model": "other", "any_model": True}
    assert "name one with --model: other, tiny" in error_of(run("submit", "--any-model", "-", stdin=NAMED))
    half = submit(run, NAMED, "--map-model", "gpt-4o=tiny", "--on-invalid", "skip")
    assert models_of(run, half) == {"a": "tiny"}
    assert run.status(half)["num_invalid_lines"] == 1


def test_all_lines_are_for_the_one_that_is_served(run: Shardq, served: str, client: redis.Redis) -> None:
    assert models_of(run, submit(run, NAMED, "--any-model")) == {"a": "tiny", "b": "tiny"}


def test_a_queue_is_filled_before_any_head_has_run(run: Shardq, client: redis.Redis) -> None:
    client.set(keys.BOOKKEEPER, "somebody")
    assert "start `shardq head --model MODEL`" in error_of(run("submit", "-", stdin=PROMPTS))
    result = run("submit", "--expect-model", "early", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.OK, result.stderr
    reason = "jobs wait for the first head that serves 'early' (start `shardq head --name early`)"
    assert f"Warning: {reason}" in result.stderr.splitlines()
    batch = result.stdout.strip()
    assert run.status(batch)["obstacles"] == [reason]
    assert reason in run("status").stderr
    assert "jobs wait for the first that serves 'early'" in run("doctor").stdout
    assert (models_of(run, batch), num_waiting(client, "early")) == ({"a": "early", "b": "early"}, 0)
    register_profile(client, "early", PROFILE)
    client.delete(keys.BOOKKEEPER)
    with run.database() as database:
        assert feed_once(database, BookkeeperSettings(broker_url=run.broker_url)) == 2
    assert num_waiting(client, "early") == 2


def test_a_name_that_no_head_can_have_is_not_waited_for(run: Shardq) -> None:
    result = run("submit", "--expect-model", "-x", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "--expect-model: no model can be served as '-x'" in error_of(result)


def test_without_any_served_model_the_way_to_one_is_said(run: Shardq) -> None:
    result = run("submit", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "shardq head --model" in error_of(result)


def test_with_several_models_one_must_be_named(run: Shardq, served: str, client: redis.Redis) -> None:
    register_profile(client, "other", PROFILE)
    result = run("submit", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.USAGE
    assert "name one with --model: other, tiny" in error_of(result)
    submit(run, PROMPTS, "--model", "other")
    assert num_waiting(client, "other") == 2


def test_the_same_name_and_file_is_the_same_batch(run: Shardq, served: str, client: redis.Redis) -> None:
    first = submit(run, PROMPTS, "--name", "nightly")
    again = run("submit", "--name", "nightly", "-", stdin=PROMPTS)
    assert again.exit_code == ExitCode.OK
    assert again.stdout.strip() == first
    assert num_waiting(client, served) == 2


def test_the_same_name_with_another_file_is_refused(run: Shardq, served: str) -> None:
    submit(run, PROMPTS, "--name", "nightly")
    result = run("submit", "--name", "nightly", "-", stdin=b'{"prompt": "other"}')
    assert result.exit_code == ExitCode.ERROR
    assert "nightly" in error_of(result)


def test_an_unreachable_queue_server_is_one_line_and_nothing_is_written(run: Shardq) -> None:
    result = run("submit", "-", stdin=PROMPTS, SHARDQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert result.exit_code == ExitCode.ERROR
    assert "does not answer" in error_of(result)
    assert json.loads(run("list", "--json").stdout) == []


def test_a_queue_server_without_password_elsewhere_is_refused(run: Shardq) -> None:
    result = run("submit", "-", stdin=PROMPTS, SHARDQ_BROKER_URL="redis://redis.example:6379/0")
    assert result.exit_code == ExitCode.ERROR
    assert "without a password" in error_of(result)


def test_a_wrong_password_is_one_line_and_not_shown(run: Shardq, tmp_path: Path) -> None:
    with running_redis(tmp_path / "locked", password="right") as server:
        url = server.url.replace("right", "wrong-one")
        result = run("submit", "-", stdin=PROMPTS, SHARDQ_BROKER_URL=url)
    assert result.exit_code == ExitCode.ERROR
    assert "wrong-one" not in error_of(result)
    assert "refuses" in error_of(result)


def test_a_directory_instead_of_a_file_is_one_line(run: Shardq, tmp_path: Path) -> None:
    assert "directory" in error_of(run("submit", str(tmp_path))).lower()


def test_an_open_batch_has_status_4_and_says_why_it_waits(run: Shardq, served: str) -> None:
    batch = submit(run)
    result = run("status", batch)
    assert result.exit_code == ExitCode.UNFINISHED
    assert "2 queued" in result.stdout
    assert "no bookkeeper runs" in result.stderr
    assert "no head is alive" in result.stderr


def test_a_batch_is_found_by_name_and_by_the_beginning_of_its_id(run: Shardq, served: str) -> None:
    batch = submit(run, PROMPTS, "--name", "nightly")
    ids = {json.loads(run("status", reference, "--json").stdout)["id"] for reference in (batch, "nightly", batch[:10])}
    assert ids == {batch}


@pytest.mark.parametrize("command", ["status", "results"])
def test_an_unknown_batch_is_one_line(run: Shardq, command: str) -> None:
    result = run(command, "nothing")
    assert result.exit_code == ExitCode.ERROR
    assert "no batch 'nothing'" in error_of(result)


def test_a_batch_whose_jobs_all_succeeded_has_status_0(run: Shardq, served: str) -> None:
    batch = submit(run)
    end_jobs(run, batch)
    assert run("status", batch).exit_code == ExitCode.OK
    assert run("results", batch).exit_code == ExitCode.OK


def test_results_are_openai_batch_lines_in_input_order(run: Shardq, served: str) -> None:
    batch = submit(run)
    end_jobs(run, batch, "a")
    result = run("results", batch)
    assert result.exit_code == ExitCode.JOBS_FAILED
    first, second = (json.loads(text) for text in result.stdout.splitlines())
    assert first["custom_id"] == "a"
    assert first["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert second["response"]["body"]["choices"][0]["text"] == "Größe,\nzwei"
    assert second["response"]["body"]["usage"]["completion_tokens"] == 3


def test_failed_jobs_go_into_an_error_file(run: Shardq, served: str, tmp_path: Path) -> None:
    batch = submit(run)
    end_jobs(run, batch, "a")
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    result = run("results", batch, "--output", str(out), "--errors", str(errors))
    assert result.exit_code == ExitCode.JOBS_FAILED
    assert result.stdout == ""
    assert [json.loads(text)["custom_id"] for text in out.read_text().splitlines()] == ["b"]
    assert [json.loads(text)["custom_id"] for text in errors.read_text().splitlines()] == ["a"]


def test_csv_has_a_row_per_job_with_text_and_figures(run: Shardq, served: str) -> None:
    batch = submit(run)
    end_jobs(run, batch)
    rows = list(csv.DictReader(io.StringIO(run("results", batch, "--format", "csv").stdout)))
    assert [row["custom_id"] for row in rows] == ["a", "b"]
    assert rows[0]["text"] == "Größe,\nzwei"
    assert float(rows[0]["acceptance"]) == 0.25


def test_the_table_fits_80_columns(run: Shardq, served: str) -> None:
    batch = submit(run)
    end_jobs(run, batch, "a")
    lines = run("results", batch, "--format", "table").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["CUSTOM_ID", "END", "TOKENS", "TOK/S", "/ROUND", "ACC", "TEXT"]
    assert "failed" in lines[1]
    assert "25%" in lines[2]


def test_results_of_an_open_batch_are_those_that_ended(run: Shardq, served: str) -> None:
    batch = submit(run)
    result = run("results", batch)
    assert result.exit_code == ExitCode.UNFINISHED
    assert result.stdout == ""
    assert "2 of 2 jobs have not ended yet" in result.stderr


def test_an_output_file_that_cannot_be_written_is_one_line(run: Shardq, served: str, tmp_path: Path) -> None:
    batch = submit(run)
    result = run("results", batch, "--output", str(tmp_path / "missing" / "out.jsonl"))
    assert result.exit_code == ExitCode.ERROR
    assert "cannot write" in error_of(result)


def test_waiting_for_a_batch_that_has_ended_writes_its_results(run: Shardq, served: str, tmp_path: Path) -> None:
    end_jobs(run, submit(run, PROMPTS, "--name", "nightly"), "b")
    out = tmp_path / "out.csv"
    result = run("submit", "--name", "nightly", "--wait", "--output", str(out), "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.JOBS_FAILED
    assert "1 completed, 1 failed" in result.stdout
    assert "tok/s" not in result.stderr  # there is no progress any more
    assert len(list(csv.DictReader(out.open(newline="")))) == 2


def test_results_that_cannot_be_written_after_all_leave_the_summary_and_the_way_to_them(
    run: Shardq, served: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch = submit(run, PROMPTS, "--name", "nightly")
    end_jobs(run, batch)
    monkeypatch.setattr("cli.commands.submit.check_place", lambda path: None)  # the directory goes while jobs run
    out = tmp_path / "gone" / "out.jsonl"
    result = run("submit", "--name", "nightly", "--wait", "--output", str(out), "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.ERROR
    assert "wall time" in result.stdout
    assert f"`shardq results {batch} --output FILE` writes the results again" in error_of(result)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_waiting_writes_results_alone_to_stdout_if_asked(
    run: Shardq, served: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    end_jobs(run, submit(run, PROMPTS, "--name", "nightly"))
    result = run("submit", "--name", "nightly", "--wait", "--output", "-", *options, "-", stdin=PROMPTS)
    assert [json.loads(line)["custom_id"] for line in result.stdout.splitlines()] == ["a", "b"]
    assert "completed" in result.stderr
    assert not Path("-").exists()


def test_waiting_prints_the_batch_as_json_if_asked(run: Shardq, served: str) -> None:
    end_jobs(run, submit(run, PROMPTS, "--name", "nightly"))
    result = run("submit", "--name", "nightly", "--wait", "--json", "-", stdin=PROMPTS)
    assert result.exit_code == ExitCode.OK
    shown = json.loads(result.stdout)
    assert shown["status"] == "completed"
    assert shown["figures"]["completion_tokens"] == 6


def test_the_list_shows_batches_newest_first_and_filters_by_state(run: Shardq, served: str) -> None:
    first, second = submit(run), submit(run)
    end_jobs(run, first)
    assert [row["id"] for row in json.loads(run("list", "--json").stdout)] == [second, first]
    completed = run("list", "--json", "--state", "completed")
    assert [row["id"] for row in json.loads(completed.stdout)] == [first]
    assert first in run("list").stdout


def test_status_without_a_batch_shows_the_system(run: Shardq, served: str) -> None:
    submit(run)
    shown = json.loads(run("status", "--json").stdout)
    assert shown["problem"] is None
    assert shown["queued"] == {"tiny": 2}
    assert shown["bookkeeper"] is False
    assert len(shown["batches"]) == 1
    assert "no head is alive" in run("status").stdout


def test_status_without_a_queue_server_still_shows_the_batches(run: Shardq, served: str) -> None:
    batch = submit(run)
    result = run("status", SHARDQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert batch in result.stdout
    assert "does not answer" in result.stderr


def test_models_are_listed_and_forgotten(run: Shardq, served: str) -> None:
    assert json.loads(run("models", "--json").stdout) == [{"name": "tiny", "profile": PROFILE.to_json(), "heads": []}]
    assert "tiny" in run("models").stdout
    assert run("models", "forget", "tiny").exit_code == ExitCode.OK
    assert json.loads(run("models", "--json").stdout) == []
    assert "no model 'tiny'" in error_of(run("models", "forget", "tiny"))


@pytest.mark.parametrize(("role", "failing"), [("client", {"bookkeeper", "heads"}), ("host", {"bookkeeper"})])
def test_doctor_finds_the_servers_and_says_what_is_missing(
    run: Shardq, redis_url: str, role: str, failing: set[str]
) -> None:
    result = run("doctor", "--json", "--role", role, SHARDQ_RELAY_URL=redis_url)
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == ExitCode.ERROR
    assert findings["wire"]["grade"] == "ok"
    assert findings["database"]["grade"] == "ok"
    assert {check for check, finding in findings.items() if finding["grade"] == "failed"} == failing
    assert "shardq bookkeeper" in findings["bookkeeper"]["text"]
    assert "shardq head" in findings["heads"]["text"]
    assert "shardq tail" in findings["tails"]["text"]


def test_doctor_takes_who_names_no_role_for_one_who_submits(run: Shardq, redis_url: str) -> None:
    urls = {"SHARDQ_RELAY_URL": redis_url}
    assert "client, for nothing says otherwise" in run("doctor", **urls).stdout
    assert "tail, by SHARDQ_TAIL_NAME" in run("doctor", **urls, SHARDQ_TAIL_NAME="b").stdout
    assert "head, by SHARDQ_HEAD_ID" in run("doctor", **urls, SHARDQ_HEAD_ID="a").stdout
    assert "host, as --role says" in run("doctor", "--role", "host", **urls, SHARDQ_HEAD_ID="a").stdout


def test_doctor_sees_whether_its_own_tail_is_alive_where_nobody_has_accounts(run: Shardq, redis_url: str) -> None:
    def tails() -> str:
        shown = json.loads(run("doctor", "--json", SHARDQ_RELAY_URL=redis_url, SHARDQ_TAIL_NAME="b").stdout)
        return next(f"{each['grade']}: {each['text']}" for each in shown if each["check"] == "tails")

    assert tails() == "failed: b is not alive: start it with `shardq tail`"
    with closing(RedisRelay(redis_url)) as relay:
        relay.announce(TailInfo(new_tail_id("b"), PROFILE, 5, 8, 65, time.time()))
        assert tails() == "ok: b is alive"


def test_doctor_wants_no_demo_model_where_none_can_run(
    run: Shardq, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*options: str) -> dict[str, str]:
        shown = json.loads(run("doctor", "--json", *options, SHARDQ_RELAY_URL=redis_url).stdout)
        return {each["check"]: each["grade"] for each in shown}

    assert "demo model" in found()
    monkeypatch.setattr("cli.doctor.machine.WORKER_PACKAGES", ["torch-that-is-not-here"])
    assert found()["worker"] == "ok"
    assert "demo model" not in found()
    assert found("--role", "head")["worker"] == "failed"


def test_doctor_finds_a_damaged_database(run: Shardq, redis_url: str) -> None:
    run("list")
    path = run.data_dir / "shardq.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x55" * (size // 2))
    findings = {each["check"]: each for each in json.loads(run("doctor", "--json", SHARDQ_RELAY_URL=redis_url).stdout)}
    assert findings["database"]["grade"] == "failed"
    assert "is damaged" in findings["database"]["text"]


def test_doctor_fails_when_a_server_is_not_there(run: Shardq, redis_url: str) -> None:
    result = run("doctor", SHARDQ_RELAY_URL="redis://127.0.0.1:1/0")
    assert result.exit_code == ExitCode.ERROR
    (line,) = [text for text in result.stdout.splitlines() if text.startswith("failed  wire")]
    assert "SHARDQ_RELAY_URL" in line


@pytest.mark.parametrize(("name", "grade"), [("missing", "failed"), ("empty", "failed"), ("whole", "ok")])
def test_doctor_looks_at_a_models_files(run: Shardq, redis_url: str, tmp_path: Path, name: str, grade: str) -> None:
    folder = tmp_path / name
    if name != "missing":
        folder.mkdir()
    if name == "whole":
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x" * 10)
    result = run("doctor", "--json", "--model", str(folder), SHARDQ_RELAY_URL=redis_url)
    (finding,) = [item for item in json.loads(result.stdout) if item["check"] == "model"]
    assert finding["grade"] == grade
