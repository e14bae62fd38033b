"""Frames that wait for the tail, and which of them it works on next. No torch, no I/O."""

from __future__ import annotations

from collections import deque

from relay.messages import Prefill, Release, Round
from relay.transport import Received

#: positions that rounds run as one may have together, padding included
MAX_MERGED = 1024

Frame = Prefill | Round | Release


class Line:
    """Rounds that wait together are taken together; they and everything else take turns.

    So a long prompt does not hold up decoding, nor decoding a prompt.
    """

    def __init__(self) -> None:
        self._rounds: deque[Received[Round]] = deque()
        self._others: deque[Received[Prefill | Release]] = deque()
        self._rounds_went = False

    def __len__(self) -> int:
        return len(self._rounds) + len(self._others)

    def put(self, received: Received[Frame]) -> None:
        """Add a frame."""
        match received.message:
            case Round() as message:
                self._rounds.append(Received(received.lane, message, received.num_bytes, received.at))
            case message:
                self._others.append(Received(received.lane, message, received.num_bytes, received.at))

    def take(self) -> list[Received[Round]] | Received[Prefill | Release]:
        """Rounds to be run as one, no slot standing in two of them, or another frame; the line is not empty."""
        self._rounds_went = bool(self._rounds) and not (self._rounds_went and self._others)
        return self._merged() if self._rounds_went else self._others.popleft()

    def _merged(self) -> list[Received[Round]]:
        taken = [self._rounds.popleft()]
        slots, rows, longest = _slots(taken[0].message), _num_rows(taken[0].message), _longest(taken[0].message)
        while self._rounds:
            following = self._rounds[0].message
            rows, longest = rows + _num_rows(following), max(longest, _longest(following))
            if rows * (1 + longest) > MAX_MERGED or slots & _slots(following):
                break  # a frame that was sent twice: its answer is known only when the first one has been applied
            slots |= _slots(following)
            taken.append(self._rounds.popleft())
        return taken


def _slots(frame: Round) -> set[int]:
    return {row.slot for row in frame.rows}


def _num_rows(frame: Round) -> int:
    return len(frame.rows)


def _longest(frame: Round) -> int:
    return max((len(row.draft) for row in frame.rows), default=0)
