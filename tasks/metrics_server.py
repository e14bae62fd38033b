"""Serves `/metrics` from a thread of the bookkeeper's process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from storage.database import Database
from tasks.connection import connect
from tasks.errors import MetricsRefused
from tasks.metrics import FiguresCollector
from tasks.settings import BookkeeperSettings
from tasks.status import BookkeeperStatus
from tasks.tally import Tally

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

#: seconds that a scrape waits for the queue server: less than Prometheus waits for a scrape
TIMEOUT_S = 2.0


class _Server(ThreadingWSGIServer):
    """A thread for each scrape; none of them keeps the process alive."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the one it overrides
        """Scrapes are nothing to log."""


def _only_metrics(metrics: WSGIApplication) -> WSGIApplication:
    """The page at its address, and at any other one where it is."""

    def answer(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environment["PATH_INFO"] == "/metrics":
            return metrics(environment, start)
        start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"not here: the metrics are at /metrics\n"]

    return answer


@contextmanager
def served_metrics(
    settings: BookkeeperSettings,
    port: int,
    database: Database,
    tally: Tally,
    status: Callable[[], BookkeeperStatus],
) -> Iterator[int]:
    """The port at which metrics are served until the block ends; `port` 0 takes a free one.

    Scrapes run in threads and on a connection of their own: whatever they meet, the bookkeeper goes on.
    Raises MetricsRefused if the address cannot be used.
    """
    registry, host = CollectorRegistry(), settings.metrics_host
    with closing(connect(settings, timeout_s=TIMEOUT_S)) as client:
        registry.register(FiguresCollector(client, database, tally, status))
        ProcessCollector(registry=registry)
        kind = _Server6 if ":" in host else _Server
        try:
            server = make_server(host, port, _only_metrics(make_wsgi_app(registry)), kind, handler_class=_Silent)
        except OSError as error:
            raise MetricsRefused(
                f"metrics cannot be served on {host}:{port}: {error.strerror or error}; "
                "choose another --metrics-port (SHARDQ_METRICS_PORT) or --metrics-host (SHARDQ_METRICS_HOST)"
            ) from error
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        log.info("metrics on http://%s:%d/metrics", host, server.server_port)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
