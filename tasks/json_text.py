"""JSON for readers that go by lines: no text in it ends one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

#: beyond ASCII, what `str.splitlines`, Node's readline and others take for the end of a line; JSON itself escapes the
#: rest
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """`value` as JSON: one line without `indent`, whatever its texts hold. Letters stay as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=default)
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    return text
