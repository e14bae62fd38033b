"""Commands about models: what is served, and the files of one."""

from __future__ import annotations

from dataclasses import asdict

import click

from cli.errors import NotFound
from cli.interruption import interruptible
from cli.options import broker_option, insecure_option, json_option
from cli.output import note, print_json, print_table, warn


@click.group("models", invoke_without_command=True)
@json_option
@broker_option
@insecure_option
@click.pass_context
def models_command(ctx: click.Context, as_json: bool) -> None:
    """The models that are served, or a model's files.

    Without a subcommand: every registered name, what it stands for, and the heads that serve it now.

    \b
    shardq models
    shardq models forget old-name
    shardq models prepare Qwen/Qwen2.5-0.5B-Instruct
    """
    if ctx.invoked_subcommand is None:
        _show(as_json)


def _show(as_json: bool) -> None:
    from tasks.connection import connect, translated
    from tasks.heads import live_heads, registered_models
    from tasks.settings import TaskSettings

    client = connect(TaskSettings())
    with translated():
        registered, heads = registered_models(client), live_heads(client)
    client.close()
    serving = {name: [head for head in heads if head.model == name] for name in registered}
    if as_json:
        rows = [
            {"name": name, "profile": profile.to_json(), "heads": [head.head_id for head in serving[name]]}
            for name, profile in registered.items()
        ]
        print_json(rows)
        return
    if not registered:
        note("no model is registered yet: start a head with `shardq head --model MODEL`")
        return
    print_table(
        ["NAME", "DTYPE", "WIRE", "CONTEXT", "HEADS", "SLOTS", "FINGERPRINT"],
        [
            (
                name,
                profile.dtype,
                profile.wire_dtype,
                profile.context,
                len(serving[name]),
                sum(head.slots for head in serving[name]),
                profile.fingerprint[:12],
            )
            for name, profile in registered.items()
        ],
        numbers={"CONTEXT", "HEADS", "SLOTS"},
    )


@models_command.command("forget")
@click.argument("name")
@json_option
@broker_option
@insecure_option
def forget(name: str, as_json: bool) -> None:
    """Free a served NAME, so that it can stand for another model.

    Refused while a head serves it. Jobs that wait for NAME go on waiting until a head serves it again.
    """
    from tasks.connection import connect, translated
    from tasks.heads import forget_model, live_heads
    from tasks.settings import TaskSettings

    client = connect(TaskSettings())
    with translated():
        serving = [head.head_id for head in live_heads(client) if head.model == name]
        if serving:
            raise NotFound(f"{name} is served by {', '.join(serving)}: stop that head first")
        known = forget_model(client, name)
    client.close()
    if not known:
        raise NotFound(f"no model {name!r} is registered: `shardq models` lists those that are")
    if as_json:
        print_json({"name": name, "forgotten": True})
    else:
        click.echo(f"{name} is free")


@models_command.command("prepare")
@click.argument("model")
@json_option
def prepare(model: str, as_json: bool) -> None:
    """Download or convert MODEL into the cache now, and check that it can be served.

    MODEL is a directory, a hub id or a .gguf file (any part of a split one). Every weight file must be there, whole,
    with all layers' tensors. Says which tokens end a text, and warns if the chat template writes another one behind an
    answer. Heads and tails fetch and convert when they start, too.
    """
    left = f"{model} is not prepared: the same command goes on with the files that have come"
    with interruptible(lambda: left):
        from cli.model_files import prepare_model

        found = prepare_model(model)
    if found.warning is not None:
        warn(found.warning)
    if as_json:
        print_json(asdict(found))
    else:
        click.echo(f"{found.path}: {found.num_layers} layers, context {found.context}, texts end at {found.ends}")
