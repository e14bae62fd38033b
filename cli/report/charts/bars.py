"""Bars: one for each of some places on a line, or one below the other with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.report.charts.axes import WIDTH, Axis, Plane, drawing, hover
from cli.report.charts.element import Element, element

#: user units of one named bar with its name
_ROW = 40.0


@dataclass(frozen=True, slots=True)
class Bar:
    """From `begin` to `end` on the axis, `value` high."""

    begin: float
    end: float
    value: float
    #: shown on hover
    text: str


def columns(
    title: str, description: str, bars: Sequence[Bar], across: Axis, up: Axis, color: str, *, marks: Sequence[Bar] = ()
) -> Element:
    """Bars that stand on a line; `marks` are upright lines at their `begin`, as for a median."""
    plane = Plane(across, up)
    shapes = [
        element(
            "rect",
            hover(bar.text),
            x=plane.x(bar.begin) + 0.5,
            y=plane.y(bar.value),
            width=max(1.0, plane.x(bar.end) - plane.x(bar.begin) - 1),
            height=plane.y(0) - plane.y(bar.value),
            class_="bar",
            style=f"--color: var(--{color})",
        )
        for bar in bars
    ]
    lines = [
        element(
            "line",
            hover(mark.text),
            x1=plane.x(mark.begin),
            x2=plane.x(mark.begin),
            y1=plane.y(up.end),
            y2=plane.y(0),
            class_="mark",
        )
        for mark in marks
    ]
    return drawing(title, description, plane.grid(), *shapes, *lines)


@dataclass(frozen=True, slots=True)
class Named:
    """A bar with a name; `color` names a CSS variable."""

    name: str
    value: float
    #: the value as it is written
    text: str
    color: str


def named_bars(title: str, description: str, bars: Sequence[Named]) -> Element:
    """Bars below each other, each under its name and value: told apart without their colours."""
    largest = max((bar.value for bar in bars), default=0.0) or 1.0
    rows: list[Element] = []
    for index, bar in enumerate(bars):
        top = index * _ROW
        rows.append(element("text", bar.name, x=0, y=top + 14))
        rows.append(element("text", bar.text, x=WIDTH, y=top + 14, text_anchor="end", class_="value"))
        shape = {"x": 0, "y": top + 20, "height": 12, "rx": 2}
        rows.append(element("rect", **shape, width=WIDTH, class_="rail"))
        width = max(1.0, WIDTH * bar.value / largest) if bar.value else 0.0
        style = f"--color: var(--{bar.color})"
        rows.append(element("rect", hover(f"{bar.name}: {bar.text}"), **shape, width=width, class_="bar", style=style))
    return drawing(title, description, *rows, height=_ROW * len(bars))
