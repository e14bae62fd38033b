"""`shardq completion`: what makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

#: the variable with which the script asks for completions
VARIABLE = "_SHARDQ_COMPLETE"


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and options.

    SHELL is bash, zsh or fish. Load it where your shell starts: ~/.bashrc, ~/.zshrc (behind `compinit`), or fish's
    folder of completions.

    \b
    eval "$(shardq completion bash)"
    eval "$(shardq completion zsh)"
    shardq completion fish > ~/.config/fish/completions/shardq.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows every shell of the choice"
    click.echo(kind(ctx.find_root().command, {}, "shardq", VARIABLE).source())
