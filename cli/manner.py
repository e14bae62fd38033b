"""How much a command says, as the whole command line was asked to."""

from __future__ import annotations

from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Manner:
    """Kept with click's context, which every command shares."""

    #: results and errors only
    quiet: bool = False


def is_quiet() -> bool:
    """Whether remarks and progress stay unsaid; False outside a command."""
    context = click.get_current_context(silent=True)
    manner = context.find_object(Manner) if context is not None else None
    return manner is not None and manner.quiet
