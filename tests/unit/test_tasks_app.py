"""The Celery application's settings and the task's seam."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from tasks import keys
from tasks.app import make_app, model_queue, transport_options
from tasks.connection import check_settings
from tasks.errors import NotAHead, QueueRefused
from tasks.generate import NAME
from tasks.generation import GenerationRequest, GenerationTask
from tasks.settings import TaskSettings

TASK = GenerationTask("job", 2, "batch", "custom", "tiny", GenerationRequest("Hi", None, 7, stop=("x",)))


class RecordingExecutor:
    """Remembers what it was asked to run."""

    def __init__(self) -> None:
        self.seen: list[GenerationTask] = []

    def run(self, request: Any, task: GenerationTask) -> dict[str, Any]:
        self.seen.append(task)
        return {"tps": 1.0}


def test_each_head_has_unacknowledged_keys_of_its_own() -> None:
    one, other, nobody = (transport_options(head)["unacked_key"] for head in ("a", "b", None))
    assert one == "shardq:a.unacked"
    assert len({one, other, nobody}) == 3


def test_nothing_but_json_is_accepted() -> None:
    configuration = make_app(TaskSettings()).conf
    assert configuration.accept_content == ["json"]
    assert configuration.task_serializer == "json"


def test_a_model_has_a_queue_of_its_own() -> None:
    assert model_queue("tiny").name == "shardq.tiny"
    assert keys.ready("tiny", versions=[1])[:2] == ["shardq.tiny", "shardq.tiny:1"]


def test_the_task_hands_its_arguments_to_the_executor_as_they_were() -> None:
    app, executor = make_app(TaskSettings()), RecordingExecutor()
    app.executor = executor
    result = app.tasks[NAME].apply(args=(TASK.to_json(),))
    assert result.get() == {"tps": 1.0}
    assert executor.seen == [TASK]


def test_outside_a_head_the_task_says_why_it_cannot_run() -> None:
    result = make_app(TaskSettings()).tasks[NAME].apply(args=(TASK.to_json(),))
    with pytest.raises(NotAHead, match="shardq head"):
        result.get()


def test_a_queue_server_without_password_off_this_machine_is_refused() -> None:
    with pytest.raises(QueueRefused, match="SHARDQ_BROKER_URL"):
        check_settings(TaskSettings(broker_url="redis://198.51.100.7:6379/0"))
    check_settings(TaskSettings(broker_url="redis://198.51.100.7:6379/0", allow_insecure=True))


def test_tls_is_verified_unless_the_address_says_otherwise() -> None:
    strict = make_app(TaskSettings(broker_url="rediss://:secret@198.51.100.7:6379/0"))
    assert strict.conf.broker_use_ssl["ssl_cert_reqs"] is ssl.CERT_REQUIRED
    chosen = make_app(TaskSettings(broker_url="rediss://:secret@198.51.100.7/0?ssl_cert_reqs=none"))
    assert chosen.conf.broker_use_ssl["ssl_cert_reqs"] is ssl.CERT_NONE
