"""How much prefill may stand in front of a round on the wire."""

from __future__ import annotations

from workers.head.speculation import Costs

#: seconds of the wire that one chunk of prefill may take while other rows decode
BUDGET_S = 0.02
#: tokens; smaller chunks cost more than they spare
MIN_CHUNK = 16


class Uplink:
    """Paces prefill by the measured time that its bytes keep the wire busy: a round waits for one chunk at most."""

    def __init__(self, costs: Costs, bytes_per_token: int, prefill_chunk: int) -> None:
        self._costs = costs
        self._bytes_per_token = bytes_per_token
        self._prefill_chunk = prefill_chunk
        self._busy_until = 0.0

    def sent(self, num_bytes: int, now: float) -> None:
        """A frame was handed over at `now`."""
        self._busy_until = max(now, self._busy_until) + self._costs.wire_s(num_bytes)

    def wait_s(self, now: float) -> float:
        """Seconds until what was sent has left."""
        return max(0.0, self._busy_until - now)

    def chunk_tokens(self) -> int:
        """Tokens of a chunk that keeps to the budget."""
        token_s = self._costs.wire_s(self._bytes_per_token)
        if token_s * self._prefill_chunk <= BUDGET_S:
            return self._prefill_chunk
        return min(self._prefill_chunk, max(MIN_CHUNK, int(BUDGET_S / token_s)))
