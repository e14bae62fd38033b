"""Messages that Celery cannot take, before it sees them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tasks.generate import NAME
from tasks.generation import Attempt
from workers.head.front_envelope import deliverable

TAG = "tag-1"
SOUND = {
    "headers": {"task": NAME, "id": "job.1"},
    "body": base64.b64encode(b"[[{}], {}, {}]").decode(),
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "properties": {"delivery_tag": TAG, "delivery_info": {"redelivered": True}, "body_encoding": "base64"},
}


def with_body(body: bytes) -> dict[str, Any]:
    return {**SOUND, "body": base64.b64encode(body).decode()}


def test_a_sound_message_is_handed_over_as_it_is() -> None:
    assert deliverable(SOUND) is SOUND


@pytest.mark.parametrize(
    "damaged",
    [
        *(with_body(body) for body in (b"", b"{", b"\xff", b"[" * 100_000, "[[1], {}, {}]".encode("utf-16"))),
        *(with_body(body) for body in (b"null", b"[]", b"[[], {}, {}]", b"[[1, 2], {}, {}]", b'[[1], {"a": 1}, {}]')),
        {**SOUND, "body": "?"},
        {**SOUND, "body": None},
        {**SOUND, "content-type": "application/x-python-serialize"},
        {**SOUND, "headers": {"task": "shardq.newer", "id": "job.1"}},
        {**SOUND, "properties": {"delivery_tag": TAG, "delivery_info": "none"}},
    ],
)
def test_a_message_that_celery_cannot_take_becomes_one_about_the_same_attempt(damaged: dict[str, Any]) -> None:
    message = deliverable(damaged)
    assert deliverable(message) is message
    assert message["headers"]["id"] == "job.1"
    assert message["properties"]["delivery_tag"] == TAG
    (inside,), _, _ = json.loads(base64.b64decode(message["body"]))
    assert json.loads(inside) == damaged


@pytest.mark.parametrize("headers", [None, [], {}, {"task": NAME}, {"task": NAME, "id": 3}])
def test_a_message_without_a_task_id_names_no_attempt(headers: object) -> None:
    message = deliverable({**SOUND, "headers": headers})
    assert Attempt.of(message["headers"]["id"]) is None


def test_an_attempt_is_told_from_its_task_id() -> None:
    assert Attempt.of("batch_1.5-2.13") == Attempt("batch_1.5-2", 13)
    assert Attempt("a", 3).task_id == "a.3"


@pytest.mark.parametrize("task_id", ["", "a", "a.", ".1", "a.-1", "a.x", "a.1.", "a.1\n", "a.٣", "a." + "9" * 20])
def test_what_is_no_task_id_names_no_attempt(task_id: str) -> None:
    assert Attempt.of(task_id) is None
