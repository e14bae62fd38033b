"""Dataclasses from values that somebody else wrote."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import pytest

from relay.plain import from_plain


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    colour: Colour | None
    where: str | tuple[int, ...] | None
    extra: dict[str, Any]
    filled: bool = False


SHAPE = Shape("ü", (Point(1, 2.0), Point(3)), Colour.RED, (1, 2), {"any": [object]}, True)
PLAIN = {"name": "ü", "points": [{"x": 1, "y": 2.0}, {"x": 3}], "colour": "red", "where": [1, 2], "extra": {}}


def test_what_was_written_is_read_back_nested_and_with_defaults() -> None:
    assert from_plain(Shape, asdict(SHAPE)) == SHAPE
    assert from_plain(Shape, PLAIN) == Shape("ü", (Point(1, 2.0), Point(3, 0.5)), Colour.RED, (1, 2), {}, False)
    assert from_plain(Shape, {**PLAIN, "colour": None, "where": "here"}).where == "here"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "Shape.name: expected str, got int"),
        ({"name": None}, "Shape.name: expected str, got NoneType"),
        ({"points": {"x": 1}}, "Shape.points: expected a list, got dict"),
        ({"points": [{"x": True}]}, "Shape.points: Point.x: expected int, got bool"),
        ({"points": [{"x": 1.0}]}, "Shape.points: Point.x: expected int, got float"),
        ({"points": [7]}, "Shape.points: Point: expected an object, got int"),
        ({"points": [{"y": 1}]}, "Shape.points: Point: no field 'x'"),
        ({"points": [{"x": 1, "z": 1}]}, "Shape.points: Point: unknown field 'z'"),
        ({"colour": "green" * 99}, f"Shape.colour: expected one of red, blue, got '{'green' * 8}'"),
        ({"colour": ["red"]}, "Shape.colour: expected one of red, blue, got \"['red']\""),
        ({"where": [1, "a"]}, "Shape.where: expected int, got str"),
        ({"filled": 1}, "Shape.filled: expected bool, got int"),
        ({"extra": []}, "Shape.extra: expected dict, got list"),
        ({7: 1}, "Shape: unknown field '7'"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^Shape") as caught:
        from_plain(Shape, {**PLAIN, **change})
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="Point: expected an object"):
        from_plain(Point, value)


def test_a_whole_number_is_a_number() -> None:
    assert from_plain(Point, {"x": 1, "y": 2}).y == 2
