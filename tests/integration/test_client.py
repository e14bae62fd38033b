"""`from shardq import Client`: batches from Python, against a real database and queue."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pandas
import pytest
import redis

import shardq
from cli.errors import ExitCode
from cli.settings import Addresses, RunningStack
from relay.plain import from_plain
from shardq import Batch, Client, InputRefused, NotFound, Refused, SettingInvalid, ShardqError, Unavailable
from storage.states import JobState
from tasks.heads import register_profile
from tasks.queues import num_waiting
from tests.cli_runner import PROFILE, PROMPTS, Shardq, error_of, numbered


@pytest.fixture
def queue(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        register_profile(connection, "tiny", PROFILE)
        yield connection


@pytest.fixture
def run(tmp_path: Path, redis_url: str, queue: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Shardq:
    """The command line of the same installation, and its variables for this process."""
    monkeypatch.setenv("SHARDQ_BROKER_URL", redis_url)
    monkeypatch.setenv("SHARDQ_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SHARDQ_CONFIG", "/dev/null")
    monkeypatch.delenv("SHARDQ_DATABASE_URL", raising=False)
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


@pytest.fixture
def client(run: Shardq) -> Iterator[Client]:
    with Client(quiet=True) as opened:
        yield opened


def requests(run: Shardq, batch: Batch) -> dict[str, dict[str, Any]]:
    """What was queued, by custom_id."""
    return {
        name: json.loads(run("show", job.id, "--json").stdout)["request"] for name, job in run.jobs(batch.id).items()
    }


def test_prompts_given_one_by_one_stand_in_the_queue(client: Client, queue: redis.Redis, run: Shardq) -> None:
    batch = client.submit((f"prompt {n}" for n in range(3)), max_tokens=7, temperature=0)
    assert num_waiting(queue, "tiny") == batch.counts.total == 3
    assert run.status(batch.id)["parameters"] == {"max_tokens": 7, "temperature": 0.0}
    assert [request["prompt"] for request in requests(run, batch).values()] == ["prompt 0", "prompt 1", "prompt 2"]


def test_chats_requests_and_prompts_may_stand_side_by_side(client: Client, run: Shardq) -> None:
    chat = [{"role": "user", "content": "hello"}]
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}}
    batch = client.submit([chat, {"custom_id": "b", "prompt": "two", "seed": 1}, line, "four"])
    asked = requests(run, batch)
    assert (asked["line-1"]["messages"], asked["b"]["seed"], asked["c"]["max_tokens"]) == (chat, 1, 3)
    assert asked["line-4"]["prompt"] == "four"


@pytest.mark.parametrize("as_text", [False, True], ids=["path", "text"])
def test_a_file_is_the_batch_that_the_command_line_makes_of_it(
    client: Client, run: Shardq, tmp_path: Path, as_text: bool
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(PROMPTS)
    batch = client.submit(str(path) if as_text else path, name="nightly")
    assert run.submit(PROMPTS, "--name", "nightly") == batch.id


def test_an_open_file_is_read_as_lines(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(PROMPTS)
    with path.open("rb") as binary, path.open(encoding="utf-8") as text, NamedTemporaryFile("w+") as wrapped:
        wrapped.write(PROMPTS.decode())
        wrapped.seek(0)
        sources = (path, binary, text, io.BytesIO(PROMPTS), wrapped)
        hashes = {client.submit(source).row.file_hash for source in sources}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"source": 5}, "expected a path, an open file, a DataFrame or prompts, got int"),
        ({"source": None}, "expected a path, an open file, a DataFrame or prompts, got NoneType"),
        ({"expect_model": 5}, "expect_model: expected a name or names, got 5"),
        ({"map_model": "a=b"}, "map_model: expected served names by name, got 'a=b'"),
        ({"metadata": ["k"]}, "metadata: expected notes by key, got ['k']"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_its_name(client: Client, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(InputRefused) as refused:
        client.submit(keywords.pop("source", ["a prompt"]), **keywords)
    assert refused.value.message == said


def test_half_a_surrogate_pair_in_an_open_file_is_refused_with_its_line(client: Client) -> None:
    with pytest.raises(InputRefused, match="line 2: expected UTF-8"):
        client.submit(io.StringIO('{"prompt": "a"}\n{"prompt": "\ud800"}\n'))


def test_a_dataframe_is_a_request_a_row_without_what_is_missing(client: Client, run: Shardq) -> None:
    frame = pandas.DataFrame(
        {"custom_id": ["a", "b"], "prompt": ["one", "two"], "max_tokens": [5, 6], "stop": ["x", None]}
    )
    asked = requests(run, client.submit(frame))
    assert [(asked[name]["prompt"], asked[name]["max_tokens"]) for name in "ab"] == [("one", 5), ("two", 6)]
    assert (asked["a"]["stop"], asked["b"]["stop"]) == (["x"], [])


def test_a_column_that_a_dataframe_has_twice_is_refused(client: Client) -> None:
    with pytest.raises(InputRefused, match="column 'prompt': expected once, there are 2 of that name"):
        client.submit(pandas.DataFrame([["one", "two"]], columns=["prompt", "prompt"]))


def test_columns_of_a_dataframe_that_are_no_fields_are_named_once_and_can_be_notes(client: Client, run: Shardq) -> None:
    frame = pandas.DataFrame({"prompt": ["one", "two"], "topic": ["x", "y"], "max_token": [5, 6]})
    with pytest.raises(InputRefused) as refusal:
        client.submit(frame)
    assert str(refusal.value).splitlines() == [
        "column 'topic': unknown parameter",
        "column 'max_token': unknown parameter; did you mean max_tokens?",
        "leave out what is no field of a line, or keep it in `metadata`, a column of objects",
    ]
    noted = frame[["prompt"]].assign(metadata=frame[["topic"]].to_dict("records"))
    assert [job.metadata for job in run.jobs(client.submit(noted).id).values()] == [{"topic": "x"}, {"topic": "y"}]


def test_messages_from_a_parquet_file_are_chats(client: Client, run: Shardq, tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    chat = [{"role": "user", "content": "hello"}]
    pandas.DataFrame({"custom_id": ["a"], "messages": [chat]}).to_parquet(path)
    assert requests(run, client.submit(pandas.read_parquet(path)))["a"]["messages"] == chat


def test_ten_thousand_lines_are_submitted_and_read_in_bounded_memory(client: Client, run: Shardq) -> None:
    count, size = 10_000, 2_000
    client.submit(["warm up"])
    tracemalloc.start()
    try:
        batch = client.submit({"custom_id": f"c{n}", "prompt": f"{n:0{size}}"} for n in range(count))
        submitting = tracemalloc.get_traced_memory()[1]
        run.end_jobs(batch.id)
        tracemalloc.reset_peak()
        seen = sum(1 for _ in batch.results())
        reading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (batch.counts.total, seen) == (count, count)
    assert max(submitting, reading) < count * size / 2


def test_results_come_out_as_a_dataframe(client: Client, run: Shardq) -> None:
    batch = client.submit(io.BytesIO(numbered(3)))
    run.end_jobs(batch.id, **{"job-2": JobState.FAILED})
    frame = batch.refresh().results().to_pandas()
    assert list(frame["custom_id"]) == ["job-1", "job-2", "job-3"]
    assert list(frame["text"].isna()) == [False, True, False]
    assert frame["completion_tokens"].dtype == "Int64"
    assert str(frame["finished_at"].dt.tz) == "UTC"
    assert list(batch.failed().to_pandas(columns=["custom_id", "error_type"]).itertuples(index=False, name=None)) == [
        ("job-2", "context_length_exceeded")
    ]


def test_inputs_and_notes_come_out_beside_the_results(client: Client, run: Shardq) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = [{"custom_id": "a", "prompt": "one", "metadata": {"page": 3}}, {"custom_id": "b", "messages": chat}]
    batch = client.submit(lines, metadata={"owner": "ann"})
    assert batch.row.metadata == {"owner": "ann"}
    run.end_jobs(batch.id)
    frame = batch.results().to_pandas(columns=["custom_id"], with_input=True)
    assert frame.to_dict("list") == {
        "custom_id": ["a", "b"],
        "prompt": ["one", None],
        "messages": [None, chat],
        "metadata": [{"page": 3}, None],
    }
    with pytest.raises(InputRefused, match="metadata: expected a key of 1 to 64 characters"):
        client.submit(["one"], metadata={"": "x"})


def test_no_result_is_an_empty_dataframe_with_the_same_columns(client: Client) -> None:
    frame = client.submit(["one"]).results().to_pandas()
    assert (len(frame), frame["completion_tokens"].dtype) == (0, "Int64")


def test_results_are_one_record_a_job_and_can_be_filtered(client: Client, run: Shardq) -> None:
    batch = client.submit(io.BytesIO(numbered(4)))
    run.end_jobs(batch.id, **{"job-2": JobState.FAILED})
    assert [(job.custom_id, job.text) for job in batch.results(where="state=completed")][:1] == [
        ("job-1", "Größe,\nzwei")
    ]
    assert [job.custom_id for job in batch.results(where=["line>1", "line<4"])] == ["job-2", "job-3"]
    assert [(job.custom_id, job.error_message) for job in batch.failed()] == [("job-2", "too long")]
    with pytest.raises(InputRefused, match="where: no column 'colour'"):
        batch.results(where="colour=red")


def test_without_pandas_the_way_to_it_is_said(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = client.submit(["one"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(shardq.PackageMissing, match=r"pip install 'shardq\[pandas\]'"):
        batch.results().to_pandas()
    assert list(batch.results()) == []


def test_what_failed_runs_again_and_what_cannot_is_told(client: Client, run: Shardq, capsys: Any) -> None:
    batch = client.submit(io.BytesIO(numbered(3)))
    with pytest.raises(Refused, match="has not ended"):
        batch.retry()
    run.end_jobs(batch.id, **{"job-1": JobState.FAILED, "job-2": JobState.CANCELLED})
    assert batch.retry() == 0
    assert batch.retry(jobs=["job-1"]) == 1
    run.end_jobs(batch.id)
    assert batch.retry(states=["cancelled"], expires_in="2h") == 1
    assert (batch.counts.num_open, batch.ended) == (1, False)
    with Client() as loud:
        again = loud.submit(io.BytesIO(numbered(1)))
        run.end_jobs(again.id, **{"job-1": JobState.FAILED})
        assert again.retry() == 0
    assert "--code context_length_exceeded runs them all the same" in capsys.readouterr().err


def test_a_batch_is_found_listed_and_cancelled(client: Client) -> None:
    first, second = client.submit(["one"], name="first"), client.submit(["two"])
    assert [batch.id for batch in client.batches()] == [second.id, first.id]
    found = client.batch("first")
    stopped = found.cancel()
    assert stopped is not None
    assert (stopped.ended, found.status) == (1, "cancelled")
    assert found.cancel() is None
    assert [batch.id for batch in client.batches(statuses=["cancelled"])] == [first.id]
    assert found.wait().ended


def test_one_job_is_cancelled(client: Client, run: Shardq) -> None:
    batch = client.submit(io.BytesIO(numbered(2)))
    client.cancel(client.find(f"{batch.id}-2"))
    assert {name: job.state.value for name, job in run.jobs(batch.id).items()}["job-2"] == "cancelled"


def test_waiting_shows_progress_and_ends_with_the_batch(run: Shardq, capsys: Any) -> None:
    with Client() as client:
        batch = client.submit(io.BytesIO(numbered(2)))
        assert batch.wait(on_poll=lambda: run.end_jobs(batch.id)).counts.completed == 2
    shown = capsys.readouterr().err
    assert "0/2 done" in shown
    assert "2/2 done" in shown


def test_a_batch_that_will_not_move_says_why_when_it_is_submitted(run: Shardq, capsys: Any) -> None:
    with Client() as client:
        client.submit(["one"])
    assert "no bookkeeper runs" in capsys.readouterr().err


def test_ctrl_c_while_prompts_are_made_says_that_nothing_was_queued(client: Client) -> None:
    def prompts() -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    with pytest.raises(shardq.Interrupted, match="nothing was queued"):
        client.submit(prompts())
    assert client.batches() == []


def test_waiting_quietly_shows_nothing(client: Client, run: Shardq, capsys: Any) -> None:
    batch = client.submit(["one"])
    batch.wait(on_poll=lambda: run.end_jobs(batch.id))
    with Client() as loud:
        loud.batch(batch.id).wait(progress=False)
    assert capsys.readouterr() == ("", "")


def test_an_interrupted_wait_leaves_the_batch_running_and_says_so(run: Shardq) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with Client() as client:
        batch = client.submit(["one"])
        with pytest.raises(KeyboardInterrupt, match=f"{batch.id} is queued and goes on without you"):
            batch.wait(on_poll=interrupt)
    assert run.status(batch.id)["status"] == "in_progress"


REFUSALS: dict[str, tuple[list[Any], list[str]]] = {
    "a bad value": ([{"prompt": "a", "temperature": -1}], []),
    "an unknown model": ([{"prompt": "a", "model": "huge"}], []),
    "nothing": ([], []),
    "a name that looks like an id": (["a"], ["--name", "batch_1"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_what_the_command_line_says(client: Client, run: Shardq, case: str) -> None:
    items, options = REFUSALS[case]
    keywords = {options[0].removeprefix("--"): options[1]} if options else {}
    with pytest.raises(ShardqError) as refusal:
        client.submit(items, **keywords)
    lines = [json.dumps(item if isinstance(item, dict) else {"prompt": item}) for item in items]
    result = run("submit", *options, "-", stdin="\n".join(lines).encode())
    assert result.stderr == f"Error: {refusal.value}\n"
    assert result.exit_code == refusal.value.exit_code


@pytest.mark.parametrize("command", ["status", "cancel", "retry", "results"])
def test_an_unknown_batch_is_told_as_the_command_line_tells_it(client: Client, run: Shardq, command: str) -> None:
    ask = client.find if command == "cancel" else client.batch
    with pytest.raises(NotFound) as refusal:
        ask("nosuch")
    assert error_of(run(command, "nosuch")) == f"Error: {refusal.value}"


def test_what_no_line_can_be_made_of_is_named_with_its_place(client: Client) -> None:
    for items, message in (
        (["a", 7], "line 2: expected a prompt (text), a list of messages or an object, got int"),
        ([{"prompt": {1, 2}}], "line 1: expected values that JSON has: set is none"),
        ({"prompt": "a"}, "put the one into a list"),
    ):
        with pytest.raises(InputRefused) as refusal:
            client.submit(items)
        assert message in str(refusal.value)
    assert client.batches() == []


def test_a_text_that_is_no_path_says_where_prompts_go(client: Client) -> None:
    for text in ("Why is the sky blue?", "long " * 1000, "no\0file"):
        with pytest.raises(Refused, match="put prompts into a list, a single one, too"):
            client.submit(text)


def test_bad_choices_are_named(client: Client) -> None:
    batch = client.submit(["one"])
    for ask, message in (
        (lambda: client.batches(statuses=["done"]), "statuses: expected a list of cancelled, "),
        (lambda: client.batches(limit=0), "limit: expected a number from 1, got 0"),
        (lambda: batch.retry(states="failed"), "states: expected a list of cancelled, expired, failed, got 'failed'"),
        (lambda: batch.retry(states=["completed"]), "got 'completed'"),
        (lambda: batch.results().to_pandas(columns=["colour"]), "columns: no column 'colour'"),
        (lambda: batch.results().to_pandas(columns=["text", "text"]), "columns: expected each name once"),
    ):
        with pytest.raises(InputRefused) as refusal:
            ask()
        assert message in str(refusal.value)


def test_results_of_all_batches_are_read_together(client: Client, run: Shardq) -> None:
    for name in ("first", "second"):
        run.end_jobs(client.submit([name], name=name).id)
    assert [job.custom_id for job in client.results(where="state=completed")] == ["line-1", "line-1"]


def test_bad_keywords_are_named(client: Client) -> None:
    for keywords, message in (
        ({"temperature": 9}, "temperature: expected"),
        ({"temprature": 1}, "temprature: "),
        ({"any_model": True, "map_model": {"a": "b"}}, "any_model: expected without map_model"),
        ({"priority": 11}, "priority: expected 0 to 9, got 11"),
        ({"expires_in": "soon"}, "expires_in: expected a duration"),
        ({"on_invalid": "ignore"}, 'on_invalid: expected "reject" or "skip"'),
    ):
        with pytest.raises(InputRefused) as refusal:
            client.submit(["a"], **keywords)
        assert message in str(refusal.value)


def test_lines_for_other_models_are_sent_to_a_served_one(client: Client, run: Shardq) -> None:
    items = [{"prompt": "a", "model": "gpt-4o-mini"}]
    for keywords in ({"map_model": {"gpt-4o-mini": "tiny"}}, {"any_model": True}):
        assert {job.model for job in run.jobs(client.submit(items, **keywords).id).values()} == {"tiny"}
    later = client.submit(["a"], expect_model="later")
    assert {job.model for job in run.jobs(later.id).values()} == {"later"}
    assert any("first head that serves 'later'" in reason for reason in later.obstacles())


def test_bad_lines_can_be_left_out(client: Client) -> None:
    batch = client.submit(["good", {"prompt": 7}], on_invalid="skip")
    assert (batch.counts.total, batch.row.num_invalid_lines) == (1, 1)


def test_a_queue_server_that_is_away_is_one_line_and_its_password_is_not_shown(
    run: Shardq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDQ_BROKER_URL", "redis://:hidden@127.0.0.1:1/0")
    with Client(quiet=True) as client, pytest.raises(Unavailable) as refusal:
        client.submit(["one"])
    result = run("submit", "-", stdin=PROMPTS, SHARDQ_BROKER_URL="redis://:hidden@127.0.0.1:1/0")
    assert error_of(result) == f"Error: {refusal.value}"
    assert "hidden" not in str(refusal.value)


def test_a_bad_address_is_named_by_its_variable(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_DATABASE_URL", "mysql://user:hidden@host/name")
    with pytest.raises(SettingInvalid, match="SHARDQ_DATABASE_URL: no database of kind 'mysql'"):
        Client()


def test_a_named_data_directory_goes_before_the_variables_which_stay_as_they_are(
    run: Shardq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDQ_DATABASE_URL", f"sqlite:///{tmp_path / 'other.sqlite3'}")
    before = dict(os.environ)
    with Client(data_dir=run.data_dir, quiet=True) as client:
        batch = client.submit(["one"])
    assert dict(os.environ) == before
    assert run.status(batch.id)["status"] == "in_progress"


def test_a_running_up_is_found_by_its_data_directory(
    run: Shardq, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDQ_BROKER_URL")
    run("list")  # makes the directory
    RunningStack(run.data_dir).write(Addresses(redis_url, "redis://127.0.0.1:1/0", run.database_url))
    with Client(quiet=True) as found, Client(data_dir=run.data_dir, quiet=True) as named:
        batch = found.submit(["one"])
        assert named.batch(batch.id).counts.queued == 1


def test_the_records_of_the_transport_could_cross_a_wire(run: Shardq) -> None:
    transport = shardq.local()
    with Client(transport, quiet=True) as client:
        batch = client.submit([{"custom_id": "a", "prompt": "one", "n": 2, "metadata": {"page": 3}}], name="nightly")
        run.end_jobs(batch.id)
        (job,) = batch.results()
        records = [job, transport.batch("nightly"), transport.progress(batch.id), transport.figures(batch.id)]
    for record in records:
        assert from_plain(type(record), json.loads(json.dumps(asdict(record)))) == record


def test_addresses_can_be_given(run: Shardq, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_BROKER_URL", "redis://127.0.0.1:1/0")
    transport = shardq.local(database_url=f"sqlite:///{tmp_path / 'own.sqlite3'}", broker_url=redis_url)
    with Client(transport, quiet=True) as client:
        batch = client.submit(["one"])
    assert run("status", batch.id, SHARDQ_DATABASE_URL=f"sqlite:///{tmp_path / 'own.sqlite3'}").exit_code == (
        ExitCode.UNFINISHED
    )


def test_the_configuration_file_holds_for_python_too(
    run: Shardq, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'broker_url = "{redis_url}"\ndata_dir = "{tmp_path / "written"}"\n', encoding="utf-8")
    monkeypatch.setenv("SHARDQ_CONFIG", str(path))
    monkeypatch.delenv("SHARDQ_BROKER_URL")
    monkeypatch.delenv("SHARDQ_DATA_DIR")
    with Client(quiet=True) as client:
        client.submit(["one"])
    assert (tmp_path / "written" / "shardq.sqlite3").exists()


def test_ctrl_c_in_a_script_that_waits_is_a_word_and_a_keyboard_interrupt(run: Shardq, tmp_path: Path) -> None:
    script = "from shardq import Client\nbatch = Client().submit(['one'])\nprint(batch.id, flush=True)\nbatch.wait()\n"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        batch = process.stdout.readline().strip()
        assert any("done" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(2)
        shown = process.stderr.read()
    assert f"Interrupted: {batch} is queued and goes on without you" in shown
    assert run.status(batch)["status"] == "in_progress"
