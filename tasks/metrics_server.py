"""Serves `/metrics` from a thread of the bookkeeper's process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from tasks.connection import connect
from tasks.errors import MetricsRefused
from tasks.metrics import FiguresCollector
from tasks.settings import BookkeeperSettings
from tasks.status import BookkeeperStatus
from tasks.tally import Tally

log = logging.getLogger(__name__)

#: seconds that a scrape waits for the queue server: less than Prometheus waits for a scrape
TIMEOUT_S = 2.0


@contextmanager
def served_metrics(
    settings: BookkeeperSettings, port: int, tally: Tally, status: Callable[[], BookkeeperStatus]
) -> Iterator[int]:
    """The port at which metrics are served until the block ends; `port` 0 takes a free one.

    Scrapes run in threads and on a connection of their own: whatever they meet, the bookkeeper goes on.
    Raises MetricsRefused if the address cannot be used.
    """
    registry, host = CollectorRegistry(), settings.metrics_host
    with closing(connect(settings, timeout_s=TIMEOUT_S)) as client:
        registry.register(FiguresCollector(client, tally, status))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise MetricsRefused(
                f"metrics cannot be served on {host}:{port}: {error.strerror or error}; "
                "choose another --metrics-port (SHARDQ_METRICS_PORT) or --metrics-host (SHARDQ_METRICS_HOST)"
            ) from error
        log.info("metrics on http://%s:%d/metrics", host, server.server_port)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
