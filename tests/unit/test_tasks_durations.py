"""Durations as people write them."""

from __future__ import annotations

import pytest

from tasks.durations import MAX_S, DurationInvalid, seconds, shortest


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("7d", 604_800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (" 2H ", 7200),
        ("45", 45),
        (45, 45),
        (0.5, 0.5),
    ],
)
def test_a_duration_is_a_number_with_units_or_of_seconds(value: object, expected: float) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize(
    "value",
    ["", "h", "soon", "10y", "-5m", "1 h", "1e3", "٣s", "9" * 50, None, True, [], -1, float("nan"), "5m!"],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(DurationInvalid, match="a duration such as 90s, 10m, 2h or 7d, or a number of seconds"):
        seconds(value)


@pytest.mark.parametrize("value", [0, "0", "0s", "99999d", 10**400, float("inf"), MAX_S + 1])
def test_no_time_and_more_than_ten_years_are_refused_with_the_limits(value: object) -> None:
    with pytest.raises(DurationInvalid, match="above 0 and at most 3653d"):
        seconds(value)


def test_no_time_at_all_can_be_allowed() -> None:
    assert seconds("0", may_be_zero=True) == 0
    with pytest.raises(DurationInvalid, match="at most 3653d"):
        seconds("4000d", may_be_zero=True)


@pytest.mark.parametrize(("number", "text"), [(86_400, "24h"), (5400, "90m"), (7, "7s"), (0, "0s"), (7199.6, "2h")])
def test_the_shortest_form_is_exact_and_reads_back(number: float, text: str) -> None:
    assert shortest(number) == text
    assert number == 0 or seconds(text) == round(number)
