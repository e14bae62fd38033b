"""What the whole command line was asked for, whichever the command."""

from __future__ import annotations

from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Manner:
    """Kept with click's context, which every command shares."""

    #: results and errors only
    quiet: bool = False
    #: variables that were set because of the data directory
    placed: frozenset[str] = frozenset()


def is_quiet() -> bool:
    """Whether remarks and progress stay unsaid; False outside a command."""
    return manner().quiet


def manner() -> Manner:
    """That of the running command; the usual one outside of a command."""
    context = click.get_current_context(silent=True)
    found = context.find_object(Manner) if context is not None else None
    return found or Manner()
