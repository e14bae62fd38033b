"""What the processors of every slot need to know of its tokens: dense tables, one row for each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from relay.messages import History, Sampling

_NO_HISTORY = History((), ())


class SlotTables:
    """Token counts and biases of `slots` slots and of a scratch one, [slots + 1, vocab] each, on one device.

    A table is allocated when a slot first needs it, and stays where it is from then on: a CUDA graph may read it. A
    slot whose sampling has no use for a table has a neutral row there (zeros). Token ids that the tables have no
    column for are left out: a drafter's vocabulary may be the smaller one.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        self.slots = slots
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        #: int32: how often the slot's output holds the token
        self.counts: Tensor | None = None
        #: whether the slot's prompt holds the token
        self.prompted: Tensor | None = None
        #: float32: what is added to the token's logit
        self.bias: Tensor | None = None
        #: whether the token may not be chosen below the sampling's `free_from`
        self.barred: Tensor | None = None
        #: slots whose rows may hold anything but zeros
        self._used: set[int] = set()
        #: slots whose output is counted
        self._counting: set[int] = set()

    @property
    def allocated(self) -> tuple[bool, ...]:
        """Which tables there are: a recorded computation knows of those that there were when it was recorded."""
        return tuple(table is not None for table in (self.counts, self.prompted, self.bias, self.barred))

    @torch.inference_mode()
    def begin(self, slot: int, sampling: Sampling, history: History | None) -> None:
        """A slot's rows for a job with these tokens so far; penalties of a job without history count from here on."""
        self.forget(slot)
        if not sampling.has_processors:
            return
        self._used.add(slot)
        if sampling.has_penalties:
            self._count_from(slot, sampling, history or _NO_HISTORY)
        if sampling.logit_bias:
            self.bias = self._allocated(self.bias, torch.float32)
            known = [(token, bias) for token, bias in sampling.logit_bias if token < self.vocab_size]
            biases = torch.tensor([bias for _, bias in known], dtype=torch.float32, device=self.device)
            self.bias[slot].index_add_(0, self._ids([token for token, _ in known]), biases)
        if sampling.barred:
            self.barred = self._allocated(self.barred, torch.bool)
            self.barred[slot, self._ids(sampling.barred)] = True

    @torch.inference_mode()
    def commit(self, committed: Mapping[int, Sequence[int]]) -> None:
        """These tokens became output of their slots: all are counted, or, where there is no memory for it, none."""
        pairs = [(slot, token) for slot in self._counting & committed.keys() for token in committed[slot]]
        pairs = [(slot, token) for slot, token in pairs if token < self.vocab_size]
        if pairs and self.counts is not None:
            slots, tokens = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(dim=1)
            ones = torch.ones(len(pairs), dtype=torch.int32, device=self.device)
            self.counts.view(-1).index_add_(0, slots * self.vocab_size + tokens, ones)

    @torch.inference_mode()
    def forget(self, slot: int) -> None:
        """The slot's job is over."""
        if slot in self._used:
            for table in (self.counts, self.prompted, self.bias, self.barred):
                if table is not None:
                    table[slot] = 0
        self._used.discard(slot)
        self._counting.discard(slot)

    def clear(self) -> None:
        """Every slot's job is over."""
        for slot in tuple(self._used):
            self.forget(slot)

    def _count_from(self, slot: int, sampling: Sampling, history: History) -> None:
        self.counts = self._allocated(self.counts, torch.int32)
        self._counting.add(slot)
        self.commit({slot: history.output})
        if sampling.repetition_penalty != 1.0:
            self.prompted = self._allocated(self.prompted, torch.bool)
            self.prompted[slot, self._ids(history.prompt)] = True

    def _allocated(self, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        if table is not None:
            return table
        return torch.zeros((self.slots + 1, self.vocab_size), dtype=dtype, device=self.device)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        known = [token for token in tokens if token < self.vocab_size]
        return torch.tensor(known, dtype=torch.int64, device=self.device)
