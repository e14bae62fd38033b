"""A value over time, as steps over equal intervals."""

from __future__ import annotations

from collections.abc import Sequence

from cli.output import duration
from cli.report.charts.axes import Axis, Plane, drawing, hover, short
from cli.report.charts.element import Element, element


def area(title: str, values: Sequence[float], width_s: float, unit: str, color: str, *, whole: bool = False) -> Element:
    """Steps over intervals of `width_s` from 0 on; `values` is not empty. `color` names a CSS variable.

    `whole`: the values are means of what is counted.
    """
    across = Axis.until(width_s * len(values), "time since the first job began", duration_short)
    plane = Plane(across, Axis.to(max(values), unit, whole=whole))
    points = [f"M{plane.x(0):.1f} {plane.y(0):.1f}"]
    for index, value in enumerate(values):
        points.append(f"V{plane.y(value):.1f}H{plane.x((index + 1) * width_s):.1f}")
    points.append(f"V{plane.y(0):.1f}Z")
    shape = element("path", d="".join(points), class_="area", style=f"--color: var(--{color})")
    mean = sum(values) / len(values)
    description = f"Mean {short(mean)}, highest {short(max(values))} {unit}, over {duration(width_s * len(values))}."
    return drawing(title, description, plane.grid(), shape, *_targets(plane, values, width_s, unit))


def _targets(plane: Plane, values: Sequence[float], width_s: float, unit: str) -> list[Element]:
    """What the pointer finds: the whole height of each interval."""
    top, bottom = plane.y(plane.up.end), plane.y(0)
    return [
        element(
            "rect",
            hover(f"{duration_short((index + 0.5) * width_s)}: {short(value)} {unit}"),
            x=plane.x(index * width_s),
            y=top,
            width=plane.x((index + 1) * width_s) - plane.x(index * width_s),
            height=bottom - top,
            class_="target",
        )
        for index, value in enumerate(values)
    ]


def duration_short(seconds: float) -> str:
    """A duration, with a fraction where it is short: `0s`, `68ms`, `6.8s`, `3m05s`."""
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.{2 if seconds < 0.01 else 3}g}ms"
    return f"{seconds:.3g}s" if seconds < 10 else duration(seconds)
