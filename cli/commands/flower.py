"""`shardq flower`: Celery's dashboard, for looking only."""

from __future__ import annotations

import logging
import os
import signal
import threading

import click

from cli.errors import CliError, Interrupted
from cli.options import broker_option, insecure_option, log_option
from cli.processes import die_with_parent

log = logging.getLogger(__name__)

#: jobs kept in memory, running or ended, unless told otherwise: 9,500 took 51 MB (`benchmarks.host`)
MAX_TASKS = 10_000
#: what the list of jobs shows, as much as fits 1,280 pixels: the name would be the same in every row
COLUMNS = "state,result,args,uuid,worker,received"
#: seconds after which a head that fell silent is no longer listed: a head started elsewhere may have another name
PURGE_S = 3600


@click.command("flower")
@click.option("--port", default=5555, show_default=True, help="Port of the page.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Address of the page.")
@click.option(
    "--max-tasks",
    type=click.IntRange(1, 1_000_000),
    default=MAX_TASKS,
    show_default=True,
    metavar="N",
    help="Jobs kept in memory; the oldest go first.",
)
@click.option("--url-prefix", metavar="PATH", help="Path under which a proxy serves the page, as `flower`.")
@broker_option
@insecure_option
@log_option
def flower_command(port: int, address: str, max_tasks: int, url_prefix: str | None) -> None:
    """Run the Flower dashboard.

    It shows jobs and heads and changes nothing. The page has no password of
    its own: keep it on this machine, or put a proxy in front.

    \b
    shardq flower
    shardq flower --port 8080 --url-prefix flower
    """
    from tasks.connection import check_settings
    from tasks.settings import TaskSettings

    settings = TaskSettings()
    check_settings(settings)
    check_address(address, port)
    die_with_parent()
    from cli.dashboard import remove_blocked, show_heads
    from tasks.app import app
    from tasks.watching import ServedQueues, SilentControl, show_progress_as_started

    app.conf.task_queues = ServedQueues(settings)
    app.control_cls = SilentControl
    show_progress_as_started()
    remove_blocked()
    show_heads()
    # its questions to workers are not sent, which is nothing to warn of
    logging.getLogger("flower.inspector").setLevel(logging.ERROR)
    url = f"http://{address}:{port}/{(url_prefix or '').strip('/')}"
    _serve(url, ["--quiet", "flower", *_arguments(port, address, max_tasks, url_prefix)])


def _serve(url: str, arguments: list[str]) -> None:
    """Run Flower until it is told to end. Raises Interrupted after Ctrl-C, for Flower a plain end."""
    from tasks.app import app

    interrupted = threading.Event()

    def handle(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        log.info("the dashboard is at %s", url)
        app.start(arguments)
    except (KeyboardInterrupt, SystemExit, click.Abort):
        if not interrupted.is_set():
            raise
    if interrupted.is_set():
        log.info("interrupted: jobs go on without the page, which begins empty when it is started again")
        raise Interrupted


def check_address(address: str, port: int) -> None:
    """Flower itself would end with a traceback. Raises CliError if the page cannot be there."""
    from tornado.netutil import bind_sockets

    try:
        for sock in bind_sockets(port, address):
            sock.close()
    except OSError as error:
        reason = error.strerror or error
        raise CliError(
            f"the page cannot be at {address}:{port}: {reason} (choose another --port or --address)"
        ) from error


def _arguments(port: int, address: str, max_tasks: int, url_prefix: str | None) -> list[str]:
    """Flower's own arguments; they win over its variables (`FLOWER_…`). Its file of settings is not read."""
    prefix = [f"--url_prefix={url_prefix.strip('/')}"] if url_prefix else []
    return [
        f"--address={address}",
        f"--port={port}",
        f"--max_tasks={max_tasks}",
        f"--tasks_columns={COLUMNS}",
        # a second lock: Flower's own, and no buttons
        "--read_only=True",
        # heads send their events unasked
        "--enable_events=False",
        "--natural_time=True",
        f"--purge_offline_workers={PURGE_S}",
        # else it sets a level and a form of its own
        "--logging=none",
        f"--conf={os.devnull}",
        *prefix,
    ]
