"""What a request generates from: a raw prompt (text or token ids) or chat messages. Never both or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.errors import ParameterInvalid
from tasks.parameter_rules import describe, is_token_id, printable

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES_TEXT = "system, developer, user or assistant"

#: what OpenAI's own answers carry beside role and content, with the values that say nothing
_SILENT: Mapping[str, tuple[object, ...]] = {
    "refusal": (),
    "audio": (),
    "function_call": (),
    "reasoning_content": (),
    "tool_calls": ([],),
    "annotations": ([],),
}


def read_prompt(value: object) -> str | tuple[int, ...]:
    """One prompt: a text, token ids, or a list holding just one of these. Raises ParameterInvalid."""
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise ParameterInvalid("prompt", f"expected one prompt, got {len(value)}: give each its own line")
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(is_token_id(item) for item in value):
        return tuple(map(int, value))
    shown = "a list of something else" if isinstance(value, list) and value else describe(value)
    raise ParameterInvalid("prompt", f"expected a text or a list of token ids, not empty, got {shown}")


def read_messages(value: object) -> tuple[dict[str, Any], ...]:
    """Chat messages as `{"role": …, "content": text}`, with `name` where given, `developer` as `system`.

    Raises ParameterInvalid.
    """
    if not isinstance(value, list) or not value:
        raise ParameterInvalid("messages", f"expected a list of messages, not empty, got {describe(value)}")
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParameterInvalid(where, f"expected an object with role and content, got {describe(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ParameterInvalid(f"{where}.role", f"expected {_ROLES_TEXT}, got {describe(role)}")
    for name, item in value.items():
        if name in ("role", "content", "name") or (name in _SILENT and (item is None or item in _SILENT[name])):
            continue
        raise ParameterInvalid(f"{where}.{printable(name)}", "not supported: expected role, content and name only")
    read = {"role": _ROLES[role], "content": _content(f"{where}.content", value.get("content"))}
    name = value.get("name")
    if name is not None and (not isinstance(name, str) or not name):
        raise ParameterInvalid(f"{where}.name", f"expected a text, not empty, got {describe(name)}")
    return read if name is None else {**read, "name": name}


def _content(where: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(value))
    raise ParameterInvalid(where, f"expected a text or a list of text parts, got {describe(value)}")


def _part(where: str, value: object) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        kind = value.get("type") if isinstance(value, dict) else value
        raise ParameterInvalid(where, f'expected {{"type": "text", "text": …}}, got {describe(kind)}')
    text = value.get("text")
    if not isinstance(text, str) or len(value) != 2:
        raise ParameterInvalid(where, 'expected {"type": "text", "text": …} with a text and nothing else')
    return text
