"""Elements of HTML and SVG. A text becomes part of a page only as a child or attribute, and is escaped there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

#: elements without an end tag
_VOID = frozenset({"meta"})


@dataclass(frozen=True, slots=True)
class Element:
    """An element with its children, in order."""

    name: str
    attributes: Mapping[str, object]
    children: tuple[Element | str, ...]

    def __str__(self) -> str:
        """The markup."""
        attributes = "".join(f' {name}="{escape(_text(value))}"' for name, value in self.attributes.items())
        if self.name in _VOID:
            return f"<{self.name}{attributes}>"
        inner = "".join(escape(child) if isinstance(child, str) else str(child) for child in self.children)
        return f"<{self.name}{attributes}>{inner}</{self.name}>"


def element(name: str, /, *children: Element | str | None, **attributes: object) -> Element:
    """An element; children that are None are left out. `class_` is `class`, `stroke_width` is `stroke-width`."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    return Element(name, named, tuple(child for child in children if child is not None))


def _text(value: object) -> str:
    # A hundredth of a pixel is more than anybody sees.
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
