"""Log probabilities of tokens under the model itself: before processors, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relay.messages import TokenLogprobs

_LOWEST = torch.finfo(torch.float32).min


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The log probabilities at each row, with its `num_top` likeliest tokens, as far as there are so many.

    Args:
        logits: float32 [n, vocab], finite.
        chosen: int64 [n], the token that was committed at each row.
        num_top: for each row.
    """
    if not num_top:
        return []
    # of finite logits that lie further apart than float32 reaches, the difference is still a number
    logprobs = logits.log_softmax(dim=-1).clamp_(min=_LOWEST)
    best = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
    rows = zip(own, best.indices.tolist(), best.values.tolist(), num_top, strict=True)
    return [TokenLogprobs(mine, tuple(ids[:num]), tuple(values[:num])) for mine, ids, values, num in rows]
