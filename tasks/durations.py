"""Durations as people write them: `90s`, `10m`, `2h`, `7d`, `1h30m`, or a number of seconds."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PART = r"([0-9]+(?:\.[0-9]+)?)([smhd])"
_TEXT = re.compile(rf"(?:{_PART})+")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")

#: seconds of the longest duration: about ten years
MAX_S = 3653.0 * 86_400
#: for messages
FORMS = "a duration such as 90s, 10m, 2h or 7d, or a number of seconds"


class DurationInvalid(ValueError):
    """Not a duration, or one that is too short or too long; the text says what was expected."""


def seconds(value: object, *, may_be_zero: bool = False) -> float:
    """A duration, as a text or as a number, in seconds. Raises DurationInvalid."""
    number = _read(value)
    if number is None:
        raise DurationInvalid(FORMS)
    if number > MAX_S or (number == 0 and not may_be_zero):
        raise DurationInvalid(f"{FORMS}, {'at' if may_be_zero else 'above 0 and at'} most {MAX_S / 86_400:g}d")
    return number


def shortest(number: float) -> str:
    """A duration with the one unit that holds it exactly, rounded to seconds: `24h`, `90m`, `7s`."""
    whole = round(number)
    for unit in ("h", "m"):
        if whole and whole % _UNITS[unit] == 0:
            return f"{whole // _UNITS[unit]}{unit}"
    return f"{whole}s"


def _read(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        # Too long stays too long, without the overflow of a huge integer; NaN is not >= 0.
        return float(min(value, 2 * MAX_S)) if value >= 0 else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    text = value.strip().lower()
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _TEXT.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
