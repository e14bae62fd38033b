"""The Celery application: `celery -A tasks.app worker|inspect|flower|purge`."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu.entity import Exchange, Queue

from relay.tls import Address
from tasks import keys
from tasks.connection import CONNECT_TIMEOUT_S, HEALTH_CHECK_S, SOCKET_TIMEOUT_S, check_settings
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
    """The application for these settings. The queue server is not contacted yet.

    Raises QueueRefused for an unsafe address.
    """
    address = check_settings(settings)
    # kombu has another name for a socket file
    url = address.url.replace("unix://", "redis+socket://", 1)
    application = ShardqCelery("shardq", broker=url, backend=url, set_as_current=False)
    application.conf.update(_configuration(settings, address))
    register(application)
    return application


def model_queue(model: str, version: int = 1) -> Any:
    """The queue of a served name's tasks of one version."""
    name = keys.queue(model, version)
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


def _configuration(settings: TaskSettings, address: Address) -> dict[str, Any]:
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
        # whose process it is decides how it logs (`tasks.logs`)
        "worker_hijack_root_logger": False,
        "broker_transport_options": transport_options(settings.head_id),
        "result_backend_always_retry": True,
        "result_expires": 3600,
        "redis_socket_timeout": SOCKET_TIMEOUT_S,
        "redis_socket_connect_timeout": CONNECT_TIMEOUT_S,
        "redis_backend_health_check_interval": HEALTH_CHECK_S,
    }
    if address.tls:
        configuration |= {"broker_use_ssl": address.tls, "redis_backend_use_ssl": address.tls}
    return configuration


#: the application of this process' settings, made when it is first asked for: options may still set variables,
#: and an address that is refused must not break an import
app: ShardqCelery


def __getattr__(name: str) -> ShardqCelery:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = application = make_app(TaskSettings())
    return application
