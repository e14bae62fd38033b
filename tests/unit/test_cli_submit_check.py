"""`shardq submit --check`: every bad input that can be known from the file, and good ones that look odd."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.errors import ExitCode
from tests.cli_runner import Shardq

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    return Shardq(tmp_path / "data", {})


def line(**values: Any) -> bytes:
    return json.dumps(values).encode()


BAD = {
    "not JSON": (b"{prompt: 1}", "JSON object"),
    "not an object": (b"[1, 2]", "JSON object"),
    "no prompt": (line(max_tokens=3), "prompt"),
    "prompt and messages": (line(prompt="a", messages=[{"role": "user", "content": "b"}]), "prompt"),
    "prompt of the wrong type": (line(prompt=7), "prompt"),
    "messages of the wrong type": (line(messages="hello"), "messages"),
    "a message without a role": (line(messages=[{"content": "hello"}]), "role"),
    "max_tokens of the wrong type": (line(prompt="a", max_tokens="many"), "max_tokens"),
    "unknown parameter": (line(prompt="a", temprature=1), "temprature"),
    "temperature out of range": (line(prompt="a", temperature=-1), "temperature"),
    "top_p out of range": (line(prompt="a", top_p=1.5), "top_p"),
    "max_tokens out of range": (line(prompt="a", max_tokens=0), "max_tokens"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', "UTF-8"),
    "unsupported url": (
        line(custom_id="a", method="POST", url="/v1/embeddings", body={"input": "x"}),
        "/v1/embeddings",
    ),
    "stream": (line(prompt="a", stream=True), "stream"),
    "too many choices": (line(prompt="a", n=129), "n"),
    "more tokens at least than at most": (line(prompt="a", min_tokens=9, max_tokens=8), "min_tokens"),
    "a bias of no token": (line(prompt="a", logit_bias={"the": 1}), "logit_bias.the"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_with_its_number_and_field(run: Shardq, tmp_path: Path, name: str) -> None:
    data, expected = BAD[name]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line(prompt="good") + b"\n" + data + b"\n")
    result = run("submit", "--check", str(path))
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    (message,) = result.stderr.splitlines()
    assert message.startswith("Error: line 2: ")
    assert expected in message


def test_a_repeated_custom_id_is_refused_and_names_the_first_line(run: Shardq) -> None:
    data = line(prompt="a", custom_id="x") + b"\n" + line(prompt="b", custom_id="x")
    result = run("submit", "--check", "-", stdin=data)
    assert result.exit_code == ExitCode.USAGE
    assert "line 2: custom_id" in result.stderr
    assert "line 1" in result.stderr


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(run: Shardq, data: bytes) -> None:
    result = run("submit", "--check", "-", stdin=data)
    assert result.exit_code == ExitCode.USAGE
    assert "holds no request" in result.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + line(prompt="byte order mark"),
        line(prompt="windows") + b"\r\n" + line(prompt="line ends") + b"\r\n",
        line(prompt="no newline at the end"),
        b"\n" + line(prompt="blank lines") + b"\n\n",
        line(prompt="neutral", n=1, stream=False, presence_penalty=0, frequency_penalty=0.0, logit_bias={}),
    ],
)
def test_odd_but_good_files_are_accepted(run: Shardq, data: bytes) -> None:
    result = run("submit", "--check", "-", stdin=data)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "0 invalid lines" in result.stdout


def test_all_bad_lines_are_reported_up_to_the_limit(run: Shardq) -> None:
    data = b"\n".join([b"{oops"] * 30)
    result = run("submit", "--check", "--max-errors", "5", "-", stdin=data)
    assert result.exit_code == ExitCode.USAGE
    lines = result.stderr.splitlines()
    assert [text.removeprefix("Error: ")[:7] for text in lines[:5]] == [f"line {n}:" for n in range(1, 6)]
    assert lines[5:] == ["… and 25 more: --errors FILE writes all of them"]


def test_every_bad_line_of_a_large_file_is_named_in_the_error_file(run: Shardq, tmp_path: Path) -> None:
    bad = range(7, 3000, 11)
    data = b"\n".join(b"oops" if number in bad else line(prompt="good") for number in range(1, 3001))
    path = tmp_path / "bad.jsonl"
    result = run("submit", "--check", "--errors", str(path), "-", stdin=data)
    assert result.exit_code == ExitCode.USAGE
    errors = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert [error["line"] for error in errors] == list(bad)
    assert all("JSON object" in error["message"] for error in errors)
    lines = result.stderr.splitlines()
    assert len(lines) == 21
    assert lines[-1] == f"… and {len(bad) - 20} more: all in {path}"


def test_an_error_file_that_cannot_be_written_is_one_line(run: Shardq, tmp_path: Path) -> None:
    result = run("submit", "--check", "--errors", str(tmp_path / "nowhere" / "bad.jsonl"), "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.ERROR
    assert result.stderr.startswith("Error: cannot write ")
    assert len(result.stderr.splitlines()) == 1


def test_invalid_lines_can_be_left_out(run: Shardq) -> None:
    data = line(prompt="good") + b"\noops\n"
    result = run("submit", "--check", "--on-invalid", "skip", "-", stdin=data)
    assert result.exit_code == ExitCode.OK
    assert result.stdout == "1 job, 1 invalid line\n"
    assert "line 2:" in result.stderr


def test_a_check_can_be_read_by_a_program(run: Shardq) -> None:
    result = run("submit", "--check", "--json", "--on-invalid", "skip", "-", stdin=line(prompt="good") + b"\noops\n")
    shown = json.loads(result.stdout)
    assert (shown["jobs"], shown["invalid_lines"]) == (1, 1)
    assert [error["line"] for error in shown["errors"]] == [2]


def test_a_file_without_a_single_good_line_is_refused_even_if_invalid_lines_are_skipped(run: Shardq) -> None:
    result = run("submit", "--check", "--on-invalid", "skip", "-", stdin=b"oops\n")
    assert result.exit_code == ExitCode.USAGE
    assert "line 1:" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--temperature", "-1"), ("--top-p", "7"), ("--max-tokens", "0"), ("--min-p", "2"), ("--top-k", "-9")],
        *[("--presence-penalty", "3"), ("--frequency-penalty", "-2.5"), ("--repetition-penalty", "0")],
        *[("--min-tokens", "-1"), ("--n", "0"), ("--top-logprobs", "21")],
        *[("--stop-token-id", "-1"), ("--logit-bias", "5=101"), ("--logit-bias", "x=1")],
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(run: Shardq, option: str, value: str) -> None:
    result = run("submit", "--check", option, value, "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith(f"Error: {option}: expected")


@pytest.mark.parametrize("value", ["5", "5=", "5=much", "=1"])
def test_a_bias_that_cannot_be_read_is_refused(run: Shardq, value: str) -> None:
    result = run("submit", "--check", "--logit-bias", value, "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.USAGE
    assert "--logit-bias" in result.stderr


def test_one_token_has_one_bias(run: Shardq) -> None:
    result = run("submit", "--check", "--logit-bias", "5=1", "--logit-bias", "5=2", "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.USAGE
    assert "token 5 has two biases" in result.stderr


def test_options_that_a_line_contradicts_are_said_with_the_line(run: Shardq) -> None:
    data = line(prompt="a") + b"\n" + line(prompt="b", max_tokens=4)
    result = run("submit", "--check", "--min-tokens", "5", "-", stdin=data)
    assert result.stderr == "Error: line 2: min_tokens: expected at most max_tokens (4), got 5\n"


def test_a_missing_file_is_one_line(run: Shardq, tmp_path: Path) -> None:
    result = run("submit", "--check", str(tmp_path / "nowhere.jsonl"))
    assert result.exit_code == ExitCode.ERROR
    assert "No such file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_output_without_wait_is_wrong_usage(run: Shardq) -> None:
    result = run("submit", "--output", "out.jsonl", "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.USAGE
    assert "--wait" in result.stderr


def test_a_check_says_which_models_lines_are_for(run: Shardq) -> None:
    data = line(prompt="a", model="gpt-4o") + b"\n" + line(prompt="b", model="gpt-4o") + b"\n" + line(prompt="c")
    assert run("submit", "--check", "-", stdin=line(prompt="c")).stderr == ""
    assert "2 lines for 'gpt-4o', if it is served" in run("submit", "--check", "-", stdin=data).stderr
    mapped = run("submit", "--check", "--json", "--map-model", "gpt-4o=m", "-", stdin=data)
    assert json.loads(mapped.stdout)["models"] == {"m": 2}
    every = run("submit", "--check", "--json", "--any-model", "--model", "n", "-", stdin=data)
    assert json.loads(every.stdout)["models"] == {"n": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--map-model", "gpt"], "'gpt' is not NAME=SERVED"),
        (["--map-model", "gpt="], "'gpt=' is not NAME=SERVED"),
        (["--map-model", "a=b", "--map-model", "a=c"], "'a' has two served names"),
        (["--map-model", "a=b", "--any-model"], "--any-model: expected without map_model"),
    ],
)
def test_a_mapping_that_means_nothing_is_wrong_usage(run: Shardq, options: list[str], message: str) -> None:
    result = run("submit", "--check", *options, "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.USAGE
    assert message in result.stderr


def test_a_check_touches_neither_database_nor_network(run: Shardq) -> None:
    run("submit", "--check", "-", stdin=line(prompt="a"))
    assert not run.data_dir.exists()


def test_the_example_is_16_good_prompts_of_every_kind(run: Shardq) -> None:
    path = EXAMPLES / "prompts.jsonl"
    result = run("submit", "--check", str(path))
    assert result.stdout == "16 jobs, 0 invalid lines\n"
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    bodies = [row.get("body", row) for row in rows]
    systems = [m["content"] for body in bodies for m in body.get("messages", []) if m["role"] == "system"]
    assert sum("prompt" in body for body in bodies) >= 4
    assert sum(body.get("temperature", 1) > 0 and "seed" in body for body in bodies) >= 4
    assert sum("stop" in body for body in bodies) >= 2
    assert len(systems) >= 4
    assert len(set(systems)) == 1


@pytest.mark.parametrize("option", ["--errors", "--output"])
def test_the_input_is_never_written_over(run: Shardq, tmp_path: Path, option: str) -> None:
    path, link = tmp_path / "prompts.jsonl", tmp_path / "link.jsonl"
    path.write_bytes(line(prompt="a"))
    link.symlink_to(path)
    for place in (path, link):
        result = run("submit", "--check", "--wait", option, str(place), str(path))
        assert result.exit_code == ExitCode.USAGE
        assert f"FILE and {option} are the same file" in result.stderr
        assert path.read_bytes() == line(prompt="a")


def test_a_redirected_input_is_not_written_over_either(run: Shardq, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line(prompt="a"))
    argv = [sys.executable, "-m", "cli.main", "submit", "-", "--check", "--errors", str(path)]
    with path.open("rb") as stdin:
        result = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, check=False)
    assert (result.returncode, path.read_bytes()) == (ExitCode.USAGE, line(prompt="a")), result.stderr


def test_results_and_errors_go_into_different_files(run: Shardq, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = run("submit", "--wait", "--output", str(path), "--errors", str(path), "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.USAGE
    assert "--output and --errors are the same file" in result.stderr
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_told_before_anything_is_queued(run: Shardq, tmp_path: Path) -> None:
    result = run("submit", "--wait", "--output", str(tmp_path / "no" / "out.jsonl"), "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.ERROR
    assert "No such file or directory (--output names another place)" in result.stderr
    assert not run.data_dir.exists()


def test_a_format_that_cannot_be_written_is_told_before_anything_is_queued(
    run: Shardq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("submit", "--wait", "--output", str(tmp_path / "out.parquet"), "-", stdin=line(prompt="a"))
    assert result.exit_code == ExitCode.ERROR
    assert "pip install 'shardq[parquet]'" in result.stderr
    assert not run.data_dir.exists()


def test_bad_lines_go_to_stdout_if_asked(run: Shardq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("submit", "--check", "--max-errors", "1", "--errors", "-", "-", stdin=b"{oops\n{oops\n")
    assert result.exit_code == ExitCode.USAGE
    assert [json.loads(text)["line"] for text in result.stdout.splitlines()] == [1, 2]
    assert result.stderr.splitlines()[1] == "… and 1 more: all on stdout"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_ends_no_command(tmp_path: Path, closed: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line(prompt="a"))
    argv = [sys.executable, "-m", "cli.main", "submit", "--check", str(path)]
    result = subprocess.run(["sh", "-c", f'exec "$@" {closed}>&-', "sh", *argv], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (ExitCode.OK, b"")


def test_joined_files_with_byte_order_marks_are_accepted(run: Shardq) -> None:
    mark = b"\xef\xbb\xbf"
    data = mark + mark + line(prompt="a") + b"\n" + mark + line(prompt="b") + b"\n" + mark
    result = run("submit", "--check", "-", stdin=data)
    assert result.stdout == "2 jobs, 0 invalid lines\n", result.stderr
