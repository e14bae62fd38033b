"""The head's half of the model, from tokens to what goes over the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relay.messages import Tensor, token_bytes
from workers.engine.shard import HeadShard
from workers.engine.tensors import hand_over, pack_rows, to_wire


class HeadForward:
    """Runs ragged rows of tokens through the half."""

    def __init__(self, shard: HeadShard, wire_dtype: str, *, hands_over: bool = False) -> None:
        """`hands_over`: the tail is in this process, and hidden states stay on the device."""
        self._shard = shard
        self._carry = hand_over if hands_over else to_wire
        self._wire_dtype = wire_dtype
        #: what a token's hidden state takes on the wire
        self.bytes_per_token = token_bytes(shard.hidden_size, wire_dtype)

    def run(self, fed: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> Tensor:
        """The packed hidden states [sum of the rows' tokens, hidden] of rows that begin at `starts`."""
        return self._carry(self._packed(fed, slots, starts), self._wire_dtype)

    def run_apart(self, fed: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> list[Tensor]:
        """As `run`, each row's hidden states [its tokens, hidden] for itself."""
        packed = self._packed(fed, slots, starts)
        return [
            self._carry(states, self._wire_dtype) for states in torch.split(packed, [len(tokens) for tokens in fed])
        ]

    def _packed(self, fed: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        counts = [len(tokens) for tokens in fed]
        query = max(counts)
        padded = [[*tokens, *[0] * (query - len(tokens))] for tokens in fed]
        hidden = self._shard.forward(torch.tensor(padded), torch.tensor(slots), torch.tensor(starts))
        return pack_rows(hidden, counts)

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Make the first positions of a slot those of another one."""
        if source != destination:
            self._shard.copy_slot(source, destination, length)

    def zero_slot(self, slot: int) -> None:
        """Clear a slot that saw values that are no numbers."""
        self._shard.zero_slot(slot)
