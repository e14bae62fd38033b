"""`shardq top`: heads, tails, link and queue, live."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click
import redis
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from cli.interruption import interruptible
from cli.keyboard import pressed_keys
from cli.options import broker_option, insecure_option, json_option
from cli.output import console, print_json
from cli.top_reading import Reading, read
from cli.top_view import view
from tasks.connection import as_task_error, connect, translated
from tasks.settings import TaskSettings


@click.command("top")
@click.option("--once", is_flag=True, help="Print the tables once; so it does where stdout is no terminal.")
@click.option(
    "--interval-s",
    type=click.FloatRange(0.5, 60),
    default=1.5,
    show_default=True,
    help="Seconds between two looks; heads tell every 2.",
)
@json_option
@broker_option
@insecure_option
def top_command(once: bool, interval_s: float, as_json: bool) -> None:
    """Heads, tails, link and queue, live.

    ACC is the share of drafted tokens that were accepted, T/RND the tokens that a row commits in a round, RTT and
    MBIT/S are those of the link to the tail. A head in yellow takes no jobs. `q` or Ctrl-C ends.

    \b
    shardq top
    shardq top --once --json
    """
    with connect(TaskSettings()) as client:
        with translated():
            reading = read(client)
        if as_json:
            print_json(reading.to_json())
        elif once or not sys.stdout.isatty():
            screen = console()
            screen.print(view(reading, width=screen.width))
        else:
            with interruptible(lambda: ""):  # one of the two ways to end it
                _watch(client, reading, interval_s)


def _watch(client: redis.Redis, reading: Reading, interval_s: float) -> None:
    screen = console()
    with pressed_keys() as keyboard, Live(console=screen, screen=True, auto_refresh=False) as live:
        trouble = ""
        while True:
            live.update(_Screen(reading, trouble), refresh=True)
            if "q" in keyboard.wait(interval_s).lower():
                return
            try:
                reading, trouble = read(client), ""
            except redis.RedisError as error:
                trouble = f"{as_task_error(error) or error}; trying again"


@dataclass(frozen=True, slots=True)
class _Screen:
    """As wide and as high as the terminal is when it is drawn, the last line for what is wrong or how to end."""

    reading: Reading
    trouble: str

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        body = screen.render_lines(view(self.reading, width=width, height=height), options.update(height=None))
        lines = body[: height - 2]
        yield from (Segments([*line, Segment.line()]) for line in lines)
        foot = Text(self.trouble or "q ends", style="red" if self.trouble else "dim", no_wrap=True, overflow="ellipsis")
        yield Group(Text(), foot)
