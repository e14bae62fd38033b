"""How much prefill may stand in front of a round on the wire."""

from __future__ import annotations

from collections import deque

#: seconds of the wire that one chunk of prefill may take while other rows decode
BUDGET_S = 0.02
#: tokens; smaller chunks cost more than they spare
MIN_CHUNK = 16
#: bytes; what smaller frames take on the way says little of the bandwidth
LARGE_FRAME = 4096
#: a frame crosses two wires, one after the other: either is busy for at least this part of its extra time
BUSY_PART = 0.5


class Uplink:
    """Paces prefill by the time that its bytes keep the wire busy: a round waits for one chunk at most.

    That time is measured on large frames: what they take beyond the fastest frame of any size. Whatever else holds
    a frame up (jitter, a busy machine) only adds to it, so the smallest of the last few counts.
    """

    def __init__(self, bytes_per_token: int, prefill_chunk: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._prefill_chunk = prefill_chunk
        self._ways: deque[float] = deque(maxlen=64)
        self._per_byte: deque[float] = deque(maxlen=16)
        self._busy_until = 0.0

    def measured(self, num_bytes: int, link_s: float) -> None:
        """A frame of this size took so long there, and its verdict back."""
        self._ways.append(link_s)
        if num_bytes >= LARGE_FRAME:
            self._per_byte.append((link_s - min(self._ways)) / num_bytes)

    def sent(self, num_bytes: int, now: float) -> None:
        """A frame was handed over at `now`."""
        self._busy_until = max(now, self._busy_until) + self._wire_s(num_bytes)

    def wait_s(self, now: float) -> float:
        """Seconds until what was sent has left."""
        return max(0.0, self._busy_until - now)

    def chunk_tokens(self) -> int:
        """Tokens of a chunk that keeps to the budget."""
        return min(self._prefill_chunk, max(MIN_CHUNK, self.tokens_in(BUDGET_S, self._prefill_chunk)))

    def tokens_in(self, seconds: float, most: int) -> int:
        """Tokens that leave in this time, up to `most`."""
        token_s = self._wire_s(self._bytes_per_token)
        return most if token_s * most <= seconds else int(seconds / token_s)

    def _wire_s(self, num_bytes: int) -> float:
        return BUSY_PART * num_bytes * min(self._per_byte, default=0.0)
