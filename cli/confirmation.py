"""A yes for what cannot be undone."""

from __future__ import annotations

import sys

import click

from cli.errors import CliError, NotConfirmed

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask. Needed where nobody can answer.")


def confirm(what: str, *, yes: bool) -> None:
    """Ask on a terminal whether to do `what`; elsewhere `yes` must stand for the answer.

    Raises NotConfirmed without one, CliError for a no.
    """
    if yes:
        return
    if not is_terminal():
        raise NotConfirmed(f"{what}: not done, there is nobody to ask; say --yes")
    try:
        goes_on = click.confirm(f"{what}: it cannot be undone. Go on?", err=True)
    except click.Abort as error:
        raise KeyboardInterrupt from error
    if not goes_on:
        raise CliError("nothing was done")


def is_terminal() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty()
