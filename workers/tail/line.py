"""Frames that wait for the tail, and which of them it works on next. No torch, no I/O."""

from __future__ import annotations

from collections import deque

from relay.messages import Prefill, Release, Round
from relay.transport import Received

#: positions that frames run as one may have together, padding included
MAX_MERGED = 1024

Frame = Prefill | Round | Release


class Line:
    """Rounds that wait together are taken together, and so are chunks of prompts; rounds and the rest take turns.

    So a long prompt does not hold up decoding, nor decoding a prompt.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[Round, Received[Frame]]] = deque()
        self._others: deque[Received[Frame]] = deque()
        self._rounds_went = False

    def __len__(self) -> int:
        return len(self._rounds) + len(self._others)

    def put(self, received: Received[Frame]) -> None:
        """Add a frame."""
        if isinstance(received.message, Round):
            self._rounds.append((received.message, received))
        else:
            self._others.append(received)

    def take(self) -> list[Received[Frame]]:
        """Frames of one kind to be worked on as one, no slot standing in two of them; the line is not empty."""
        self._rounds_went = bool(self._rounds) and not (self._rounds_went and self._others)
        return self._merged() if self._rounds_went else self._other()

    def _merged(self) -> list[Received[Frame]]:
        first, received = self._rounds.popleft()
        taken = [received]
        slots, rows, longest = _slots(first), _num_rows(first), _longest(first)
        while self._rounds:
            following, received = self._rounds[0]
            rows, longest = rows + _num_rows(following), max(longest, _longest(following))
            if rows * (1 + longest) > MAX_MERGED or slots & _slots(following):
                break  # a frame that was sent twice: its answer is known only when the first one has been applied
            slots |= _slots(following)
            taken.append(received)
            self._rounds.popleft()
        return taken

    def _other(self) -> list[Received[Frame]]:
        """A release, or chunks: a prefix must have been computed before it is copied, so only the first may copy."""
        taken = [self._others.popleft()]
        first = taken[0].message
        if not isinstance(first, Prefill):
            return taken
        slots = {first.slot} if first.copy is None else {first.slot, first.copy.slot}
        lengths = [first.hidden.shape[0]]
        while self._others and isinstance(following := self._others[0].message, Prefill):
            lengths.append(following.hidden.shape[0])
            if following.copy is not None or following.slot in slots or not _worth_merging(lengths):
                break
            slots.add(following.slot)
            taken.append(self._others.popleft())
        return taken


def _worth_merging(lengths: list[int]) -> bool:
    """Whether chunks of these lengths, padded to the longest, are half themselves at least, and not too many."""
    padded = len(lengths) * max(lengths)
    return padded <= min(MAX_MERGED, 2 * sum(lengths))


def _slots(frame: Round) -> set[int]:
    return {row.slot for row in frame.rows}


def _num_rows(frame: Round) -> int:
    return len(frame.rows)


def _longest(frame: Round) -> int:
    return max((len(row.draft) for row in frame.rows), default=0)
