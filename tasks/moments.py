"""Moments to come as people write them: a duration from now (`11h30m`), or a time of the day (`06:30`)."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from tasks.durations import DurationInvalid, seconds

_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")

#: for messages
FORMS = "a duration such as 11h30m, or a time of the day such as 06:30"


def ahead(value: str, now: float) -> float:
    """The moment in seconds since the epoch; a time of the day is this machine's next one. Raises DurationInvalid."""
    clock = _CLOCK.fullmatch(value.strip())
    if clock is None:
        try:
            return now + seconds(value)
        except DurationInvalid:
            raise DurationInvalid(FORMS) from None
    today = datetime.fromtimestamp(now)
    at = today.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
    return (at if at > today else at + timedelta(days=1)).timestamp()
