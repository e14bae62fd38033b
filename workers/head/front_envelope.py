"""The envelope of a message, looked at before kombu and Celery do: what they cannot take would end their consumer.

A front that ends over a message gets it again, and those behind it wait. What is inside of a sound envelope is
`tasks.generate`'s to read.
"""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

from tasks.generate import NAME

logger = logging.getLogger(__name__)


def deliverable(message: dict[str, Any]) -> dict[str, Any]:
    """`message` if Celery can take it; else one that it can, about the same task, with the other one's text inside.

    The executor cannot read that either, and refuses it.
    """
    fault = _fault(message)
    if fault is None:
        return message
    headers, properties = message.get("headers"), message["properties"]
    named = headers.get("id") if isinstance(headers, dict) else None
    task_id = named if isinstance(named, str) else str(properties["delivery_tag"])
    logger.error("a message that cannot be read: %s", fault, extra={"task": task_id})
    info = properties["delivery_info"]
    return {
        "headers": {"task": NAME, "id": task_id},
        "body": base64.b64encode(json.dumps([[json.dumps(message)], {}, {}]).encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "properties": {
            "delivery_tag": properties["delivery_tag"],
            "delivery_info": info if isinstance(info, dict) else {},
            "body_encoding": "base64",
        },
    }


def _fault(message: dict[str, Any]) -> str | None:
    """What is wrong with it; it has properties, and a delivery tag among them."""
    headers, properties = message.get("headers"), message["properties"]
    if not isinstance(headers, dict) or not isinstance(headers.get("id"), str):
        return "no task id in its headers"
    if headers.get("task") != NAME:
        return f"the task {headers.get('task')!r:.40} is not known here"
    if not isinstance(properties["delivery_info"], dict):
        return "no delivery info"
    form = (message.get("content-type"), message.get("content-encoding"), properties.get("body_encoding"))
    if form != ("application/json", "utf-8", "base64"):
        return f"its body is {form!r:.80}, not JSON in base64"
    try:
        body = json.loads(base64.b64decode(message["body"]).decode())
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        return f"its body cannot be decoded: {type(error).__name__}"
    match body:
        case [[_], dict() as by_name, dict()] if not by_name:
            return None
    return "its body is not that of one task"
