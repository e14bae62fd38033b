"""The nucleus of a distribution: the likeliest tokens that together have a given probability (top-p).

Holtzman et al. 2020, "The curious case of neural text degeneration", arXiv 1904.09751; the rule on the limit is that
of `TopPLogitsWarper` in `transformers`: the least likely tokens go as long as their sum stays within `1 - top_p`.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: likeliest tokens of a row among which a CPU looks for the nucleus before it sorts the whole row
SELECTED = 1024

_OFF = float("-inf")


def top_p(scores: Tensor, limit: Tensor) -> Tensor:
    """The scores inside each row's nucleus, -inf outside; a row's best token always stays.

    Sorting a row costs a CPU more than everything else that sampling does, and a nucleus is nearly always small:
    there it is selected from the likeliest tokens, and only rows with a larger one are sorted.

    Args:
        scores: float32 [n, vocab], -inf allowed.
        limit: float64 [n, 1], 0..1.
    """
    if scores.device.type != "cpu" or scores.shape[-1] <= 2 * SELECTED:
        return by_sorting(scores, limit)
    kept, found = by_selection(scores, limit)
    filtered = scores.masked_fill(~kept, _OFF)
    missed = found.logical_not().nonzero()[:, 0]
    if len(missed):
        filtered[missed] = by_sorting(scores[missed], limit[missed])
    return filtered


def by_sorting(scores: Tensor, limit: Tensor) -> Tensor:
    """`top_p` for any row, in one shape that depends on no value."""
    ascending, order = scores.sort(dim=-1, stable=True)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - limit).to(scores.dtype)
    removed[:, -1] = False
    return scores.masked_fill(removed.scatter(-1, order, removed), _OFF)


def by_selection(scores: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The same rule from the likely end: a token stays while those likelier than it have less than `limit`.

    Returns what stays, bool [n, vocab], and whether that is the answer, bool [n]: it is not where the `SELECTED`
    likeliest tokens all stay. Sums run the other way than in a sort, so a token that lies on the limit to within a
    float's rounding may fall differently.
    """
    best = scores.topk(SELECTED, dim=-1).values
    top = best[:, :1]
    chances = (best - top).exp() / (scores - top).exp_().sum(dim=-1, keepdim=True)
    before = chances.cumsum(dim=-1, dtype=torch.float64) - chances
    stays = before < limit
    stays[:, 0] = True
    last = best.gather(-1, stays.sum(dim=-1, keepdim=True) - 1)
    room = (stays & (best == last)).sum(dim=-1, keepdim=True)
    tied = scores == last
    if bool((tied.sum(dim=-1, keepdim=True) > room).any()):
        tied &= tied.flip(-1).cumsum(dim=-1).flip(-1) <= room  # a stable sort keeps those with the highest ids
    return tied | (scores > last), ~stays[:, -1]
