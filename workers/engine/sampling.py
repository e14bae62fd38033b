"""Choosing a token: one rule for drafter and target, for plain and speculative decoding.

A row's token is `argmax(filtered log p + g)` with `g` from `workers.engine.noise`. By the Gumbel-max theorem
that is an exact sample of the filtered distribution; drafter and target share `g`, so the better the
drafter's distribution fits, the more often both choose the same token (Daliri, Musco, Suresh 2024, arXiv
2408.07978). Since every token is the target's own choice, the drafter cannot bias the text. The noise must
never meet a `u < p/q` acceptance test.

The filters are those of `transformers` (`TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper`,
`MinPLogitsWarper`, in this order), with parameters of each row's own. On a GPU no shape depends on a tensor's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relay.messages import Sampling
from workers.engine import noise
from workers.engine.nucleus import top_p

#: at and below this temperature a row is greedy: a softmax so sharp only separates rounding errors
MIN_TEMPERATURE = 1e-6

_OFF = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of `n` rows of logits, as tensors on their device.

    Which rows need what is decided on the host, from the settings alone: nothing is read back from the
    device.
    """

    #: where the tensors came from, row by row
    settings: tuple[Sampling, ...]
    temperature: Tensor  # float32 [n]
    top_k: Tensor  # int64 [n], 0 = off
    top_p: Tensor  # float64 [n], 1 = off; double so that 1 - top_p rounds as in transformers
    min_p: Tensor  # float32 [n], 0 = off
    seed: Tensor  # int64 [n]
    #: rows that sample; the others are greedy
    sampled: Tensor  # int64 [m]
    #: places within `sampled` of the rows with that filter on
    with_top_k: Tensor
    with_top_p: Tensor
    with_min_p: Tensor
    #: largest `top_k` among the sampled rows
    max_top_k: int

    @classmethod
    def from_rows(cls, rows: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingRows:
        """The tensors of `rows`, one row of logits each."""
        sampled = [row for row in rows if row.temperature > MIN_TEMPERATURE]

        def integers(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def where(flags: Sequence[bool]) -> Tensor:
            return integers([place for place, flag in enumerate(flags) if flag])

        return cls(
            settings=tuple(rows),
            temperature=floats([row.temperature for row in rows]),
            top_k=integers([row.top_k for row in rows]),
            top_p=floats([row.top_p for row in rows], torch.float64),
            min_p=floats([row.min_p for row in rows]),
            seed=integers([row.seed for row in rows]),
            sampled=where([row.temperature > MIN_TEMPERATURE for row in rows]),
            with_top_k=where([row.top_k > 0 for row in sampled]),
            with_top_p=where([row.top_p < 1.0 for row in sampled]),
            with_min_p=where([row.min_p > 0.0 for row in sampled]),
            max_top_k=max((row.top_k for row in sampled), default=0),
        )

    def repeat(self, counts: Sequence[int]) -> SamplingRows:
        """Row `r` repeated `counts[r]` times, in order: one row for each of its packed tokens."""
        pairs = zip(self.settings, counts, strict=True)
        repeated = [setting for setting, count in pairs for _ in range(count)]
        return SamplingRows.from_rows(repeated, self.seed.device)

    def __len__(self) -> int:
        return len(self.settings)


def choose(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """The token of every row.

    Args:
        logits: float32 [n, vocab], finite.
        rows: n rows of parameters.
        positions: int64 [n], absolute position of the token being chosen (one after that of its logits).

    Returns:
        int64 [n]. Of equal scores the lowest id wins.
    """
    if len(rows.sampled) == 0:
        return logits.argmax(dim=-1)
    if len(rows.sampled) == len(rows):
        return _sample(logits, rows, positions)
    picked = _sample(logits[rows.sampled], rows, positions[rows.sampled])
    return logits.argmax(dim=-1).index_copy(0, rows.sampled, picked)


def filtered(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Scaled logits of the rows that sample, -inf where a filter removed the token.

    Args:
        logits: float32 [m, vocab], only the rows of `rows.sampled`.
        rows: the parameters of all rows.

    Returns:
        float32 [m, vocab]; its softmax is the distribution that is sampled.
    """
    mine = rows.sampled
    scores = logits / rows.temperature[mine].unsqueeze(-1)
    if len(rows.with_top_k):
        size = min(rows.max_top_k, logits.shape[-1])
        scores = _on(rows.with_top_k, scores, lambda part, k: _top_k(part, k, size), rows.top_k[mine])
    if len(rows.with_top_p):
        scores = _on(rows.with_top_p, scores, top_p, rows.top_p[mine])
    if len(rows.with_min_p):
        scores = _on(rows.with_min_p, scores, _min_p, rows.min_p[mine])
    return scores


def _sample(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """`argmax(log p + g)` of the sampled rows: logits [m, vocab], positions [m] -> int64 [m]."""
    scores = filtered(logits, rows)
    # Around zero a float32 resolves the noise best; the constant between score and log p does not matter.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores += noise.gumbel(rows.seed[rows.sampled], positions, logits.shape[-1])
    return scores.argmax(dim=-1)


def _on(places: Tensor, scores: Tensor, rule: Callable[[Tensor, Tensor], Tensor], parameter: Tensor) -> Tensor:
    """`rule` applied to the rows at `places` only, with their parameter as a column."""
    column = parameter.unsqueeze(-1)
    if len(places) == len(scores):
        return rule(scores, column)
    return scores.index_copy(0, places, rule(scores[places], column[places]))


def _top_k(scores: Tensor, top_k: Tensor, size: int) -> Tensor:
    """Keep the `top_k` best of each row and what equals the last of them; `size` is the largest `top_k`."""
    last = (top_k - 1).clamp_(max=size - 1)
    threshold = scores.topk(size, dim=-1).values.gather(-1, last)
    return scores.masked_fill(scores < threshold, _OFF)


def _min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than `min_p` times the likeliest."""
    probabilities = scores.softmax(dim=-1)
    return scores.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), _OFF)
