"""What a head with `--until` still begins."""

from __future__ import annotations

import signal
import time
from datetime import datetime

import pytest
from pydantic import ValidationError

from cli.errors import Interrupted
from cli.interruption import stop_on_signals
from tasks import moments
from tasks.durations import DurationInvalid
from workers.head.closing import LAST_S, Closing
from workers.settings import HeadSettings


def closing(ends_at: float | None, now: float = 0.0) -> Closing:
    return Closing(ends_at, lambda: now)


def test_a_head_without_an_end_begins_everything() -> None:
    assert closing(None).admits(10**6, 10**9)


def test_an_unmeasured_head_is_taken_for_a_slow_one() -> None:
    assert closing(210.0).admits(0, 100)
    assert not closing(190.0).admits(0, 100)


def test_a_measured_pace_decides_and_the_prompt_counts() -> None:
    quick = closing(100.0)
    quick.measured(20.0)
    assert quick.admits(0, 900)
    assert not quick.admits(8 * 900, 900)


def test_the_first_job_that_cannot_be_finished_closes_for_good() -> None:
    head = closing(100.0)
    assert not head.closed
    assert not head.admits(0, 1000)
    assert head.closed
    assert not head.admits(0, 1)


def test_shortly_before_the_end_a_head_is_closed_without_having_seen_a_job() -> None:
    assert not closing(LAST_S + 1).closed
    assert closing(LAST_S - 1).closed


def test_until_is_a_duration_from_now_or_the_next_such_time_of_the_day() -> None:
    noon = datetime(2030, 1, 2, 12, 0).timestamp()
    assert moments.ahead("11h30m", noon) == noon + 11.5 * 3600
    assert moments.ahead("12:30", noon) == noon + 1800
    assert moments.ahead("11:30", noon) == noon + 23.5 * 3600
    for wrong in ("", "25:00", "12:60", "soon", "-1h"):
        with pytest.raises(DurationInvalid, match="06:30"):
            moments.ahead(wrong, noon)


def test_the_settings_read_until_when_they_are_made_and_leave_room_for_the_grace() -> None:
    settings = HeadSettings(model="tiny", until="1h", grace_s=60)  # type: ignore[arg-type]
    assert settings.until == pytest.approx(time.time() + 3600, abs=5)
    assert settings.stops_at == pytest.approx(time.time() + 3540, abs=5)
    with pytest.raises(ValidationError, match="until"):
        HeadSettings(model="tiny", until="soon")  # type: ignore[arg-type]


def test_the_clock_stops_a_worker_as_a_signal_does() -> None:
    with stop_on_signals("nothing", time.time() + 0.05) as stop:
        assert stop.wait(5)


def test_a_process_that_ctrl_c_stopped_says_so_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with stop_on_signals("all goes on") as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    with pytest.raises(Interrupted) as raised, stop_on_signals("all goes on"):
        signal.raise_signal(signal.SIGINT)
    assert caplog.messages == ["interrupted: all goes on"]
    assert raised.value.message == ""  # it was logged
