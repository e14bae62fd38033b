"""Verification: how much of a draft holds. Plain decoding is the case of no draft.

The committed tokens of row `r` are `choices[r, : accepted[r] + 1]`: the accepted draft *is* the target's
choice at these places, and the next choice is the target's own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify(choices: Tensor, drafts: Tensor, lengths: Tensor) -> Tensor:
    """Length of the longest prefix of every draft that equals the target's choices.

    Args:
        choices: int64 [rows, K + 1]; `choices[r, i]` is the target's token after the base and `i` drafted.
        drafts: int64 [rows, K], padded with anything.
        lengths: int64 [rows], real drafted tokens of each row, 0..K.

    Returns:
        int64 [rows], 0..lengths[r].
    """
    places = torch.arange(drafts.shape[1], device=drafts.device)
    holds = (choices[:, :-1] == drafts) & (places < lengths.unsqueeze(1))
    return holds.long().cumprod(dim=1).sum(dim=1)
