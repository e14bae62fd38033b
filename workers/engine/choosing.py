"""Choosing tokens for rows whose sampling parameters stand in buffers, as recorded computations need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relay.messages import Sampling
from workers.engine.sampling import SamplingRows, choose


@dataclass(frozen=True, slots=True)
class Parameters:
    """Sampling parameters of `n` rows of logits, at fixed addresses: a computation reads what stands there by then."""

    temperature: Tensor  # float32 [n]
    top_k: Tensor  # int32 [n], 0 = off
    top_p: Tensor  # float32 [n], 1 = off
    min_p: Tensor  # float32 [n], 0 = off
    seed: Tensor  # int64 [n]

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device | str = "cpu") -> Parameters:
        """The parameters of these rows."""
        single = torch.float32
        return cls(
            temperature=torch.tensor([row.temperature for row in rows], dtype=single, device=device),
            top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
            top_p=torch.tensor([row.top_p for row in rows], dtype=single, device=device),
            min_p=torch.tensor([row.min_p for row in rows], dtype=single, device=device),
            seed=torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device),
        )

    @classmethod
    def greedy(cls, rows: int, device: torch.device | str) -> Parameters:
        """Rows without sampling."""
        return cls.of([GREEDY] * rows, device)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def repeat(self, times: int) -> Parameters:
        """Every row so often, in order."""
        return Parameters(**{name: value.repeat_interleave(times) for name, value in self.tensors().items()})


GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen for every row."""

    tokens: Tensor  # int64 [n]
    #: softmax of the row's own logits at its token
    confidence: Tensor  # float32 [n]
    #: whether all its logits are numbers, and finite
    finite: Tensor  # bool [n]


def has_filter(sampling: Sampling) -> bool:
    """Whether some tokens are never chosen because they are unlikely."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def choose_rows(logits: Tensor, rows: Parameters, positions: Tensor, *, num_tokens: int, cuts: bool) -> Chosen:
    """The token of every row by the rule of `workers.engine.sampling`.

    Args:
        logits: [n, at least `num_tokens`], any float dtype.
        rows: their parameters.
        positions: int64 [n], absolute position of the token being chosen.
        num_tokens: ids from here on are padding and never chosen.
        cuts: whether some row may have a filter on; without, filters are ignored.
    """
    if logits.is_cuda:
        from workers.engine.kernels import choose as kernels  # only machines with a GPU have Triton

        return kernels.choose(logits, rows, positions, num_tokens=num_tokens, cuts=cuts)
    real = logits[:, :num_tokens].float()
    tokens = choose(real, SamplingRows.from_rows(_read(rows), logits.device), positions)
    confidence = (real.gather(1, tokens[:, None])[:, 0] - real.logsumexp(dim=-1)).exp()
    return Chosen(tokens, confidence, real.isfinite().all(dim=-1))


def _read(rows: Parameters) -> list[Sampling]:
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
    return [Sampling(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
