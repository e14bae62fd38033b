"""What a head counts of its own work, for its presence to tell.

The engine's thread counts and measures; any thread may ask.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from relay.tail_figures import TailFigures
from tasks.figures import HeadFigures
from workers.head.costs import Costs
from workers.head.courier import Answered
from workers.head.ledger import Spent
from workers.memory import gpu_memory

#: seconds between two looks at what is not counted but measured
MEASURE_EVERY_S = 1.0
#: askings over which acceptance and tokens per round are averaged; presence asks every 2 s
WINDOW = 6


class _Rounds(NamedTuple):
    """Totals of rounds."""

    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class HeadGauge:
    """Totals of a head's process; outlives its epochs."""

    def __init__(
        self, drafter: str, max_lanes: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._drafter = drafter
        self._max_lanes = max_lanes
        self._device = device
        self._clock = clock
        self._due = float("-inf")
        self._num_frames = 0
        self._spent = (0.0, 0.0, 0.0, 0.0)
        self._bytes = (0, 0)
        self._tokens = 0
        self._prompt_tokens = 0
        self._rounds = _Rounds()
        self._recent: deque[_Rounds] = deque([self._rounds], maxlen=WINDOW)
        self._lanes = 0
        self._link: tuple[float | None, float | None] = (None, None)
        self._gpu = gpu_memory(device)
        self._tail_id = ""
        self._tail: TailFigures | None = None
        #: when the tail told that
        self._tail_told = 0.0

    def opened(self, tail_id: str) -> None:
        """An epoch on this tail begins."""
        self._tail_id, self._tail = tail_id, None

    def began(self, num_prompt_tokens: int) -> None:
        """A job got its slot."""
        self._prompt_tokens += num_prompt_tokens

    def answered(self, answered: Answered, spent: Spent, *, is_round: bool) -> None:
        """A frame has its verdict."""
        self._num_frames += is_round
        draft_s, head_s, link_s, tail_s = self._spent
        self._spent = (draft_s + spent.draft_s, head_s + spent.head_s, link_s + spent.link_s, tail_s + spent.tail_s)
        self._bytes = (self._bytes[0] + answered.bytes_up, self._bytes[1] + answered.bytes_down)
        if answered.verdict.figures is not None:
            self._tail, self._tail_told = answered.verdict.figures, self._clock()

    def committed(self, kept: int, drafted: int | None, accepted: int) -> None:
        """A row's tokens joined its text; `drafted` is None for prefill's own token."""
        self._tokens += kept
        if drafted is not None:
            rows, tokens, all_drafted, all_accepted = self._rounds
            self._rounds = _Rounds(rows + 1, tokens + kept, all_drafted + drafted, all_accepted + accepted)

    def measure(self, lanes: int, costs: Costs) -> None:
        """Look at what is not counted, at most once a second. From the engine's thread: costs change in it."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + MEASURE_EVERY_S
        self._lanes = lanes
        self._gpu = gpu_memory(self._device)
        if costs.num_rounds and sum(self._bytes):
            byte_s = costs.wire_s(1.0)
            self._link = 1000 * costs.link_s(0.0), 8e-6 / byte_s if byte_s > 0 else None

    def figures(self, running: int, waiting: int, tokens_per_s: float) -> HeadFigures:
        """Everything, with these counts of the moment; numbers rounded to what can be meant."""
        rounds, before = self._rounds, self._recent[0]
        self._recent.append(rounds)
        draft_s, head_s, link_s, tail_s = (round(seconds, 4) for seconds in self._spent)
        rtt_ms, mbit_per_s_up = self._link
        return HeadFigures(
            drafter=self._drafter,
            lanes=self._lanes if running else 0,
            max_lanes=self._max_lanes,
            running=running,
            waiting=waiting,
            tokens_per_s=round(tokens_per_s, 2),
            acceptance=_ratio(rounds.accepted - before.accepted, rounds.drafted - before.drafted),
            tokens_per_round=_ratio(rounds.tokens - before.tokens, rounds.rows - before.rows),
            rounds_total=self._num_frames,
            row_rounds_total=rounds.rows,
            tokens_total=self._tokens,
            round_tokens_total=rounds.tokens,
            prompt_tokens_total=self._prompt_tokens,
            drafted_total=rounds.drafted,
            accepted_total=rounds.accepted,
            draft_s_total=draft_s,
            head_s_total=head_s,
            link_s_total=link_s,
            tail_s_total=tail_s,
            rtt_ms=None if rtt_ms is None else round(rtt_ms, 3),
            mbit_per_s_up=None if mbit_per_s_up is None else round(mbit_per_s_up, 3),
            bytes_up_total=self._bytes[0],
            bytes_down_total=self._bytes[1],
            gpu_used_bytes=self._gpu[0],
            gpu_total_bytes=self._gpu[1],
            tail_id=self._tail_id,
            tail=self._tail_by_now(),
        )

    def _tail_by_now(self) -> TailFigures | None:
        """A tail tells with its verdicts only: while there are none, nothing of it changes but its age."""
        tail, told = self._tail, self._tail_told
        return tail and replace(tail, uptime_s=round(tail.uptime_s + self._clock() - told, 1))


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
