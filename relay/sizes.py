"""The most bytes that a round and its verdict can take: a head keeps to them when it puts a round together.

Msgpack writes small values shorter; here every field has its largest one, as `relay.upward` and `relay.downward` lay
them out. An integer of 31 bits takes 5 bytes, one of 63 bits or a number 9.
"""

from __future__ import annotations

#: around a header: prefix and padding
FRAME_BYTES = 8 + 15
#: kind, number, the list of rows, the tensor's dtype, shape and two lengths
_ROUND_BYTES = 1 + 1 + 9 + 3 + (1 + 9 + 11 + 5 + 5)
#: slot, generation, round, position, base token, the list of drafted tokens
_DRAFT_BYTES = 1 + 5 + 9 + 9 + 5 + 5 + 3
#: a drafted token, and the scale of its hidden state
_DRAFTED_BYTES = 5 + 4
#: kind, number, the list of rows, two times, the tail's figures
_VERDICT_BYTES = 1 + 1 + 9 + 3 + 9 + 9 + 55
#: slot, generation, round, accepted, the lists of tokens and of log probabilities; with one token as much as a void
_ACCEPTED_BYTES = 1 + 5 + 9 + 9 + 3 + 3 + 3
_COMMITTED_BYTES = 5


def round_header_bytes(num_rows: int, num_tokens: int) -> int:
    """Of a round's header; `num_tokens` are base tokens and drafted ones."""
    return _ROUND_BYTES + num_rows * _DRAFT_BYTES + num_tokens * _DRAFTED_BYTES


def verdict_header_bytes(num_rows: int, num_tokens: int, logprob_bytes: int) -> int:
    """Of the header of a verdict that commits so many tokens, with so many bytes of log probabilities."""
    return _VERDICT_BYTES + num_rows * _ACCEPTED_BYTES + num_tokens * _COMMITTED_BYTES + logprob_bytes


def logprob_bytes(num_top: int | None) -> int:
    """Of a committed token's log probabilities with those of `num_top` likeliest ones; None: none are asked for."""
    return 0 if num_top is None else (1 + 3 + 5 * num_top) + (2 + 4 * (1 + num_top))
