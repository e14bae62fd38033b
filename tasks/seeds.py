"""Seeds of the completions of one request."""

from __future__ import annotations

_MASK = 2**64 - 1
#: the increment and the multipliers of SplitMix64
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def choice_seed(seed: int, choice: int) -> int:
    """The seed of completion `choice` (from 0) of a request with `seed`, both signed 64 bit; the first one's is `seed`.

    The others are outputs of SplitMix64 (Steele, Lea, Flood 2014) whose state began at `seed`: a job with n = 1 and
    this seed writes the same text. `docs/parameters.md` tells users so; changing this changes texts.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed
