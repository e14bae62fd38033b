"""The head's sessions: what it makes of tails that die, and of tails that are slow."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from relay.errors import LinkLost
from workers.head.courier import GIVE_UP_AFTER_S, Courier, TailSilent
from workers.head.worker import MAX_PATIENCE_S, HeadWorker


class Sessions:
    """A search that finds a session as often as `ends` says how one ends."""

    obstacle = "no tail is there"

    def __init__(self, ends: list[LinkLost], stop: threading.Event) -> None:
        self.left, self.stop = list(ends), stop

    def wait(self, stop: threading.Event, timeout_s: float | None) -> Any:
        if not self.left:
            self.stop.set()
            return None
        return Mock(**{"lease.epoch": 1, "lease.tail.tail": "tail-00000000"})


class Engine:
    """Every epoch of it ends at its first step."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.patience: list[float] = []

    def open(self, courier: Courier) -> None:
        self.patience.append(courier.give_up_after_s)

    def step(self) -> None:
        raise self.sessions.left.pop(0)


@pytest.mark.parametrize(
    ("ends", "patience"),
    [
        ([TailSilent("slow")] * 3, [30, 60, 120]),
        ([TailSilent("slow"), LinkLost("died"), TailSilent("slow")], [30, 60, 30]),
        ([TailSilent("slow")] * 8, [30, 60, 120, 240, 480, 600, 600, 600]),
    ],
)
def test_a_tail_that_was_too_slow_for_a_frame_gets_longer_in_the_next_epoch(
    ends: list[LinkLost], patience: list[float]
) -> None:
    assert (GIVE_UP_AFTER_S, MAX_PATIENCE_S) == (30, 600)
    stop = threading.Event()
    sessions = Sessions(ends, stop)
    engine = Engine(sessions)
    HeadWorker(engine, Mock(), Mock()).serve(sessions, stop, None)  # type: ignore[arg-type]
    assert engine.patience == patience
