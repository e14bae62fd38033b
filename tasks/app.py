"""The Celery application: `celery -A tasks.app worker|inspect|flower|purge`."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from kombu.entity import Exchange, Queue

from tasks import keys
from tasks.connection import CONNECT_TIMEOUT_S, HEALTH_CHECK_S, SOCKET_TIMEOUT_S
from tasks.generate import GenerateExecutor, register
from tasks.settings import TaskSettings

#: seconds after which a message whose taker stopped refreshing its claim is delivered again
VISIBILITY_TIMEOUT_S = 120
#: seconds between two looks for such messages
RESTORE_INTERVAL_S = 5


class ShardqCelery(Celery):  # type: ignore[misc]
    """A Celery application whose head processes have an engine."""

    #: set by a head's front before it consumes; everywhere else `shardq.generate` refuses to run
    executor: GenerateExecutor | None = None


def make_app(settings: TaskSettings) -> ShardqCelery:
    """The application for these settings. The queue server is not contacted yet."""
    app = ShardqCelery("shardq", broker=settings.broker_url, backend=settings.broker_url, set_as_current=False)
    app.conf.update(_configuration(settings))
    register(app)
    return app


def model_queue(model: str) -> Any:
    """The queue of a served name."""
    name = keys.queue(model)
    exchange = Exchange(name, type="direct")  # type: ignore[no-untyped-call]
    return Queue(name, exchange, routing_key=name)  # type: ignore[no-untyped-call]


def transport_options(head_id: str | None) -> dict[str, Any]:
    """Kombu's options for the queue server. Each head has unacknowledged keys of its own."""
    return {
        # short, because a front refreshes what it works on; see `workers.head.front`
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        # kombu's own sweep would come about every 100 s
        "unacked_restore_interval": RESTORE_INTERVAL_S,
        "unacked_restore_throttle": 1,
        "unacked_key": keys.unacked(head_id),
        "unacked_index_key": keys.unacked_index(head_id),
        "unacked_mutex_key": keys.unacked_mutex(head_id),
        # without these a half-open connection hangs for good
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": HEALTH_CHECK_S,
        "queue_order_strategy": "priority",
        "priority_steps": list(keys.PRIORITIES),
        "sep": keys.SEPARATOR,
    }


def _configuration(settings: TaskSettings) -> dict[str, Any]:
    configuration: dict[str, Any] = {
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "task_default_queue": "shardq",
        "task_create_missing_queues": True,
        "task_acks_late": True,
        "task_track_started": True,
        # the database is the record, Flower lives on events: results would only cost round trips
        "task_ignore_result": True,
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": True,
        # has no effect in the threads pool but to warn at every start
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": transport_options(settings.head_id),
        "result_backend_always_retry": True,
        "result_expires": 3600,
        "redis_socket_timeout": SOCKET_TIMEOUT_S,
        "redis_socket_connect_timeout": CONNECT_TIMEOUT_S,
        "redis_backend_health_check_interval": HEALTH_CHECK_S,
    }
    url = urlsplit(settings.broker_url)
    if url.scheme == "rediss" and "ssl_cert_reqs" not in url.query:
        configuration |= {
            "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_REQUIRED},
            "redis_backend_use_ssl": {"ssl_cert_reqs": ssl.CERT_REQUIRED},
        }
    return configuration


app = make_app(TaskSettings())
