"""Making the frames of a prefill: chunks of several prompts run as one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relay.messages import Copy, Prefill, Tensor
from workers.head.forward import HeadForward
from workers.head.jobs import Job
from workers.head.scheduler import Chunk
from workers.head.slots import HeadSlot


@dataclass(frozen=True, slots=True)
class MadeChunk:
    """A chunk ready to be sent, and its share of what it took to make it."""

    frame: Prefill
    head_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens sent."""
        return self.frame.hidden.shape[0]


class ChunkMaker:
    """Makes the prefill frames of one engine."""

    def __init__(self, forward: HeadForward) -> None:
        self._forward = forward

    def make(self, next_number: Callable[[], int], chunks: Sequence[Chunk]) -> list[MadeChunk]:
        """The frames of chunks that `together` let through."""
        started = time.perf_counter()
        copies = [self._copy(chunk) for chunk in chunks]
        fed = [_tokens(chunk) for chunk in chunks]
        hidden = self._forward.run_apart(fed, [chunk.slot.index for chunk in chunks], [chunk.start for chunk in chunks])
        token_s = (time.perf_counter() - started) / sum(map(len, fed))
        return [
            MadeChunk(_frame(next_number(), chunk, copy, states), token_s * chunk.length)
            for chunk, copy, states in zip(chunks, copies, hidden, strict=True)
        ]

    def _copy(self, chunk: Chunk) -> Copy | None:
        if chunk.copy is None or chunk.copied is None:
            return None
        copy = Copy(chunk.copy.source.index, chunk.copied, chunk.copy.length)
        self._forward.copy_slot(copy.slot, chunk.slot.index, copy.length)
        return copy


def together(chunks: Sequence[Chunk], following: Chunk) -> bool:
    """Whether a chunk may run in one forward with those: its prefix must have been computed, and is not among them.

    Rows are padded to the longest one: no more than half of the positions shall be padding.
    """
    if following.copy is not None or any(chunk.slot is following.slot for chunk in chunks):
        return False
    lengths = [*(chunk.length for chunk in chunks), following.length]
    return len(lengths) * max(lengths) <= 2 * sum(lengths)


def _frame(number: int, chunk: Chunk, copy: Copy | None, hidden: Tensor) -> Prefill:
    slot, job = chunk.slot, _job(chunk.slot)
    return Prefill(
        number=number,
        slot=slot.index,
        generation=chunk.generation,
        round=chunk.round,
        position=chunk.start,
        token=job.tokens[chunk.start + chunk.length - 1],
        last=chunk.last,
        sampling=job.sampling if chunk.last else job.sampling.without_processors,
        copy=copy,
        hidden=hidden,
        history=job.history if chunk.last else None,
    )


def _tokens(chunk: Chunk) -> list[int]:
    return _job(chunk.slot).tokens[chunk.start : chunk.start + chunk.length]


def _job(slot: HeadSlot) -> Job:
    assert slot.job is not None, "a slot that is prefilled has a job"
    return slot.job
