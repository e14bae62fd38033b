"""Control characters in what people read: a text of a model or of a file must not steer a terminal."""

from __future__ import annotations

#: C0, DEL, C1 and Unicode's ends of lines → as Python writes them: `\x1b`, `\n`
_VISIBLE = {
    code: chr(code).encode("unicode_escape").decode() for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}
_VISIBLE_IN_LINES = {code: text for code, text in _VISIBLE.items() if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """A text of one line, each control character in it visible."""
    return text.translate(_VISIBLE)


def visible_lines(text: str) -> str:
    """A text of several lines, each control character but line ends and tabs visible."""
    return text.translate(_VISIBLE_IN_LINES)
