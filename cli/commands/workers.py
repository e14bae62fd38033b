"""Commands that run one process of the system until Ctrl-C or SIGTERM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from cli.durations import moment
from cli.interruption import stop_on_signals
from cli.options import broker_option, count_or_auto, database_option, given, insecure_option, log_option, relay_option
from cli.processes import die_with_parent

F = TypeVar("F", bound=Callable[..., Any])

#: options of a head that its tail is given, too
_SHARED = (
    *("split", "dtype", "wire_dtype", "load_format", "quantization", "device", "graphs", "deterministic"),
    *("max_length", "slots"),
)


def model_options(function: F) -> F:
    """What head and tail must be told alike."""
    options = [
        click.option("--model", metavar="MODEL", help="Directory, hub id or .gguf file.  [env: SHARDQ_MODEL]"),
        click.option(
            "--split",
            type=count_or_auto,
            metavar="LAYER|auto",
            help="First layer of the tail; `auto` goes by both sides' memory and pace. Default: the middle.",
        ),
        click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Default: float32."),
        click.option(
            "--wire-dtype",
            type=click.Choice(["float32", "float16", "bfloat16", "int8"]),
            help="Of the hidden states between head and tail; narrower than --dtype changes texts. Default: --dtype.",
        ),
        click.option(
            "--load-format",
            type=click.Choice(["auto", "dummy"]),
            help="`dummy`: random weights of the model's shapes, for benchmarks; needs config and tokenizer only.",
        ),
        click.option(
            "--quantization",
            type=click.Choice(["none", "nf4", "int8"]),
            help="Of the layers' weights, by bitsandbytes, in 4 or 8 bits; changes texts. Default: none.",
        ),
        click.option("--device", metavar="DEVICE", help="`cpu`, `cuda`, `cuda:1`, … Default: cpu."),
        click.option(
            "--graphs/--no-graphs",
            default=None,
            help="On a GPU: record computations once per shape, with fused kernels. Default: yes.",
        ),
        click.option(
            "--deterministic/--no-deterministic",
            default=None,
            help="A job's text never depends on batch mates, drafts or retries, in half precision too. Default: no.",
        ),
        click.option("--max-length", type=int, metavar="TOKENS", help="Longest prompt + completion. Default: 1024."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def head_options(function: F) -> F:
    """What only the head is told."""
    options = [
        click.option("--name", metavar="NAME", help="Served name. Default: the last part of MODEL."),
        click.option(
            "--slots",
            type=count_or_auto,
            metavar="N|auto",
            help="Jobs decoded at the same time; `auto` takes as many as fit. Default: 16.",
        ),
        click.option(
            "--draft-length",
            type=count_or_auto,
            metavar="K|auto",
            help="Tokens drafted per row; 0 = none; `auto` goes by measured acceptance and cost. Default: auto.",
        ),
        click.option("--max-draft-length", type=int, metavar="K", help="Longest draft of `auto`. Default: 16."),
        click.option(
            "--drafter", type=click.Choice(["none", "ngram", "suffix", "model", "hybrid"]), help="Default: ngram."
        ),
        click.option("--drafter-model", metavar="MODEL", help="The small model for `--drafter model` or `hybrid`."),
        click.option(
            "--drafter-device",
            metavar="DEVICE",
            help="Another device than --device drafts while the head's half computes. Default: --device.",
        ),
        click.option(
            "--drafter-dtype",
            type=click.Choice(["float32", "float16", "bfloat16"]),
            help="Of the drafter's model; changes no text. Default: --dtype.",
        ),
        click.option(
            "--drafter-quantization",
            type=click.Choice(["none", "nf4", "int8"]),
            help="Of the drafter's weights; changes no text. Default: none.",
        ),
        click.option(
            "--lanes",
            type=count_or_auto,
            metavar="N|auto",
            help="Rounds in flight at the same time; `auto` goes by measured times. Default: auto.",
        ),
        click.option("--max-lanes", type=int, metavar="N", help="Most lanes of `auto`. Default: 8."),
        click.option("--prefill-chunk", type=int, metavar="TOKENS", help="Default: 64; of a whole head 256."),
        click.option(
            "--prefix-reuse/--no-prefix-reuse",
            default=None,
            help="Copy what a prompt has in common with a recent one. Default: yes.",
        ),
        click.option(
            "--wire-compress/--no-wire-compress",
            default=None,
            help="Deflate hidden states, without loss; for links below some 100 Mbit/s. Default: no.",
        ),
        click.option("--fronts", type=int, help="Celery consumer processes. Default: 8."),
        click.option("--tail-timeout-s", type=float, help="Give up at start without a tail. Default: wait."),
        click.option("--grace-s", type=float, help="Seconds to finish running jobs when stopped. Default: 10."),
        click.option("--trace", metavar="FILE", help="Write a timeline of every round, in Chrome trace format."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def worker_arguments(options: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of `model_options` and `head_options` as arguments of `shardq head` and of `shardq tail`.

    The model is left out: whoever starts the two names it.
    """
    both = {name: options.get(name) for name in _SHARED}
    head = {name: value for name, value in options.items() if name != "model"}
    return _arguments(head), _arguments(both)


def _arguments(options: Mapping[str, Any]) -> tuple[str, ...]:
    arguments: list[str] = []
    for name, value in given(**options).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return tuple(arguments)


@click.command("head")
@model_options
@head_options
@click.option(
    "--whole/--no-whole",
    default=None,
    help="Run both halves in this process, without tail and relay: for a model that fits one machine. Default: no.",
)
@click.option(
    "--until",
    type=moment,
    metavar="TIME",
    help="End by then, `11h30m` from now or at `06:30`; take no job that may last longer. Default: never.",
)
@click.option("--head-id", metavar="ID", help="Stable id of this head. Default: the host's name.")
@broker_option
@relay_option
@insecure_option
@log_option
def head_command(**options: Any) -> None:
    """Run the first half of a model and take jobs.

    Every option is also an environment variable, `SHARDQ_<OPTION>`. A head without a tail takes no jobs, except with
    --whole: then it is both.

    \b
    shardq head --model Qwen/Qwen2.5-7B-Instruct --dtype float16 --device cuda
    shardq head --whole --model Qwen/Qwen2.5-3B --dtype float16 --device cuda
    """
    from cli.first_checks import check_head
    from workers.settings import HeadSettings

    die_with_parent()
    settings = HeadSettings(**given(**options))
    check_head(settings)
    if settings.whole:
        from workers.whole.worker import run
    else:
        from workers.head.worker import run

    with stop_on_signals("its unfinished jobs stand in the queue again", settings.stops_at) as stop:
        run(settings, stop)


@click.command("tail")
@model_options
@click.option("--tail-name", metavar="NAME", help="What the tail is called. Default: the host's name.")
@click.option(
    "--slots",
    type=count_or_auto,
    metavar="N|auto",
    help="Most slots a head may ask for; `auto` takes as many as fit. Default: 64.",
)
@relay_option
@insecure_option
@log_option
def tail_command(**options: Any) -> None:
    """Run the second half of a model.

    That is the layers from the split on, sampling and verification. Every option is also an environment
    variable, `SHARDQ_<OPTION>`. Needs only the relay's Redis.

    \b
    shardq tail --model Qwen/Qwen2.5-7B-Instruct --dtype float16 --device cuda
    """
    from cli.first_checks import check_tail
    from workers.settings import TailSettings

    die_with_parent()
    settings = TailSettings(**given(**options))
    check_tail(settings)
    from workers.tail.worker import run

    with stop_on_signals("its head's jobs go on where it finds another tail") as stop:
        run(settings, stop)


@click.command("bookkeeper")
@database_option
@broker_option
@insecure_option
@log_option
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve figures for Prometheus at this port. Default: none.  [env: SHARDQ_METRICS_PORT]",
)
@click.option(
    "--metrics-host",
    metavar="ADDRESS",
    help="Address of that port; it has no password. Default: 127.0.0.1.  [env: SHARDQ_METRICS_HOST]",
)
def bookkeeper_command(**options: Any) -> None:
    """Keep the database: feed, record and reconcile jobs.

    Feeds waiting jobs to the queue, records finished ones, queues lost ones again. One per installation, on the
    machine that has the database. With --metrics-port one page tells Prometheus of all heads and tails.

    \b
    shardq bookkeeper
    shardq bookkeeper --metrics-port 9464
    """
    from cli.database import opened
    from tasks.bookkeeper import BUSY_TIMEOUT_MS, run
    from tasks.settings import BookkeeperSettings

    die_with_parent()
    left = "jobs in the queue go on, and their results wait there for a bookkeeper"
    with opened(BUSY_TIMEOUT_MS) as database, stop_on_signals(left) as stop:
        run(database, BookkeeperSettings(**given(**options)), stop)
