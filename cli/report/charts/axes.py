"""The frame that charts share: a plane of round numbers with a grid, labels, a title and a description."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cli.report.charts.element import Element, element

#: user units of a chart; its text has 13, and 14 at the width of a telephone, where they are drawn smaller
WIDTH, HEIGHT = 400.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 10.0, 10.0, 38.0
#: intervals of an axis, at most
_NUM_TICKS = 4
#: user units from the right end within which a label ends there instead
_NEAR = 18.0
_DAY_S = 86400.0
_ANCHORS = {False: "middle", True: "end"}
#: seconds between marks of a time axis; below the first and above the last, round numbers of seconds and days
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from 0 to `end`, with marks; `label` says what they are, in which unit."""

    end: float
    ticks: tuple[float, ...]
    label: str
    #: how a mark is written
    write: Callable[[float], str]

    @classmethod
    def to(
        cls, largest: float, label: str, write: Callable[[float], str] | None = None, *, whole: bool = False
    ) -> Axis:
        """An axis of round numbers that `largest` fits on; of whole ones only, for what is counted."""
        largest = largest if largest > 0 else 1.0
        step = round_step(largest / _NUM_TICKS)
        if whole and step % 1:
            step = 1.0 if step < 1 else 2 * step  # 2.5
        number = math.ceil(largest / step - 1e-9)
        return cls(number * step, tuple(index * step for index in range(number + 1)), label, write or short)

    @classmethod
    def until(cls, end: float, label: str, write: Callable[[float], str]) -> Axis:
        """An axis of seconds that ends at `end`, with marks at whole minutes, hours or days where it is that long."""
        step = round_duration(end / _NUM_TICKS)
        return cls(end, tuple(index * step for index in range(int(end / step * (1 + 1e-9)) + 1)), label, write)


@dataclass(frozen=True, slots=True)
class Plane:
    """Where values lie in a chart."""

    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        """User units from the left."""
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / self.across.end

    def y(self, value: float) -> float:
        """User units from the top."""
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / self.up.end

    def grid(self) -> Element:
        """Lines and labels behind the values."""
        lines: list[Element] = []
        left, right, bottom = self.x(0), self.x(self.across.end), self.y(0)
        for tick in self.up.ticks:
            at = self.y(tick)
            lines.append(element("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
            lines.append(_label(self.up.write(tick), left - 5, at + 4, "end"))
        for tick in self.across.ticks:
            # A label in the middle of the last mark would be cut off at the edge.
            near = tick > 0 and right - self.x(tick) < _NEAR
            lines.append(_label(self.across.write(tick), right if near else self.x(tick), bottom + 15, _ANCHORS[near]))
        lines.append(_label(self.across.label, (left + right) / 2, HEIGHT - 5, "middle"))
        return element("g", *lines, class_="axes")


def drawing(title: str, description: str, *children: Element, height: float = HEIGHT) -> Element:
    """An SVG that is read aloud as its title and description."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=f"{title}. {description}",
    )


def hover(text: str) -> Element:
    """What a shape says when the pointer rests on it."""
    return element("title", text)


def _label(text: str, x: float, y: float, anchor: str) -> Element:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def round_step(rough: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def round_duration(rough_s: float) -> float:
    """The least duration that people count in which is not below `rough_s`, in seconds."""
    if rough_s < _TIME_STEPS_S[0]:
        return round_step(rough_s)
    fitting = (float(step) for step in _TIME_STEPS_S if step >= rough_s * (1 - 1e-9))
    return next(fitting, _DAY_S * round_step(rough_s / _DAY_S))


def short(value: float) -> str:
    """A number in few characters: `0`, `0.25`, `40`, `1.5k`, `2M`."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def whole_shares(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f}%"
