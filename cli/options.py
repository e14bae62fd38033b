"""Options that several commands share, and how they reach the settings of other packages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def refuse_password(url: str, variable: str) -> None:
    """Raise UsageError for an address on the command line that holds a password."""
    if ":" in url.partition("://")[2].rpartition("@")[0]:
        raise click.UsageError(
            f"Everybody on this machine can read a password on the command line: set {variable} instead."
        )


def _set_variable(variable: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def callback(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        # The variable, not an argument: Celery's application reads it when it is imported.
        if value is not None and not ctx.resilient_parsing:
            refuse_password(value, variable)
            os.environ[variable] = value

    return callback


def _address_option(flag: str, variable: str, what: str) -> Callable[[F], F]:
    return click.option(
        flag,
        metavar="URL",
        expose_value=False,
        callback=_set_variable(variable),
        help=f"{what}  [env: {variable}]",
    )


broker_option = _address_option("--broker-url", "SHARDQ_BROKER_URL", "The queue server.")
relay_option = _address_option("--relay-url", "SHARDQ_RELAY_URL", "The server between head and tail.")
database_option = _address_option("--database-url", "SHARDQ_DATABASE_URL", "The database.")


def insecure_option(function: F) -> F:
    """`--allow-insecure`, which reaches every package through its variable."""

    def callback(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            os.environ["SHARDQ_ALLOW_INSECURE"] = "true"

    return click.option(
        "--allow-insecure",
        is_flag=True,
        expose_value=False,
        callback=callback,
        help="Talk to a Redis without password on another machine.  [env: SHARDQ_ALLOW_INSECURE]",
    )(function)


def log_option(function: F) -> F:
    """`--log-level`, applied before the command runs."""

    def callback(ctx: click.Context, _: click.Parameter, value: str) -> None:
        if not ctx.resilient_parsing:
            from tasks.logs import configure

            configure(value, process=str(ctx.command.name))

    return click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        envvar="SHARDQ_LOG_LEVEL",
        expose_value=False,
        callback=callback,
        help="How much is logged.  [env: SHARDQ_LOG_LEVEL]",
    )(function)


def count_or_auto(value: str | int) -> int | str:
    """The type of an option that is a whole number from 0, or `auto`."""
    if value == "auto":
        return "auto"
    try:
        count = int(value)
    except ValueError:
        count = -1
    if count < 0:
        raise click.BadParameter(f"{value!r} is neither a number from 0 nor 'auto'.")
    return count


def given(**values: Any) -> dict[str, Any]:
    """The options that were given: the rest is left to the environment and to the defaults."""
    return {name: value for name, value in values.items() if value is not None}
