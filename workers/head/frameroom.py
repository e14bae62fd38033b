"""What goes into one frame: how many rows a round takes, how long their drafts may be. No torch, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from relay.codec import MAX_HEADER_BYTES
from relay.fields import MAX_ALTERNATIVES, MAX_ROWS
from relay.sizes import FRAME_BYTES, logprob_bytes, round_header_bytes, verdict_header_bytes


class FrameRoom:
    """The room of a link's frames, on the way up and for the verdict on the way down."""

    def __init__(self, token_bytes: int, max_frame_bytes: int | None) -> None:
        """`token_bytes`: what a token's hidden state takes; `max_frame_bytes` None: frames have no size."""
        self._token_bytes = token_bytes
        self._max_bytes = max_frame_bytes
        #: rows of a round: whatever they want to know, so many have room without drafts
        self.most_rows = max(1, bisect_left(range(1, MAX_ROWS + 1), True, key=lambda rows: not self._holds_bare(rows)))

    def chunk(self, most: int) -> int:
        """Tokens of a prefill chunk, up to `most`, whatever stands in its header."""
        if self._max_bytes is None:
            return most
        return max(1, min(most, (self._max_bytes - FRAME_BYTES - MAX_HEADER_BYTES) // self._token_bytes))

    def shorten(self, lengths: Sequence[int], num_top: Sequence[int | None]) -> list[int]:
        """Draft lengths, none above its own of `lengths`, of which a round and its verdict have room.

        The longest drafts are cut, all to the same length, and no more than need be. At most `most_rows` rows.

        Args:
            lengths: tokens worth sending, by row.
            num_top: likeliest tokens that a row wants to know at each position; None: no log probabilities.
        """

        def at(most: int) -> list[int]:
            return [min(most, length) for length in lengths]

        if self.holds(lengths, num_top):
            return list(lengths)
        return at(bisect_left(range(max(lengths)), True, key=lambda most: not self.holds(at(most + 1), num_top)))

    def holds(self, lengths: Sequence[int], num_top: Sequence[int | None]) -> bool:
        """Whether rows with drafts of these lengths fit a round, and whatever may come of them a verdict."""
        told = sum((1 + length) * logprob_bytes(top) for length, top in zip(lengths, num_top, strict=True))
        return self._fits(len(lengths), len(lengths) + sum(lengths), told)

    def _holds_bare(self, num_rows: int) -> bool:
        return self._fits(num_rows, num_rows, num_rows * logprob_bytes(MAX_ALTERNATIVES))

    def _fits(self, num_rows: int, num_tokens: int, told_bytes: int) -> bool:
        if self._max_bytes is None:
            return True
        room = self._max_bytes - FRAME_BYTES
        up, down = round_header_bytes(num_rows, num_tokens), verdict_header_bytes(num_rows, num_tokens, told_bytes)
        return max(up, down) <= min(MAX_HEADER_BYTES, room) and up + num_tokens * self._token_bytes <= room
