"""Messages and tails for the relay's tests."""

from __future__ import annotations

import time

from relay import keys
from relay.messages import Accepted, Draft, Hello, Round, Tensor, Verdict
from relay.profile import Profile
from relay.transport import Lease, TailInfo

PROFILE = Profile("fingerprint", "float32", "none", "float32", deterministic=False, context=1024)


def tail_info(name: str = "gpu-b") -> TailInfo:
    return TailInfo(keys.new_tail_id(name), PROFILE, split=2, slots=8, max_query=64, pulse=time.time())


def hello_for(lease: Lease, lanes: int = 1, head: str = "gpu-a") -> Hello:
    return Hello(head, lease.epoch, lanes, PROFILE, split=2, slots=8, max_query=64)


def round_of(number: int, num_bytes: int = 64) -> Round:
    """A round of one row without draft whose hidden state takes `num_bytes`."""
    hidden = Tensor("int8", (1, num_bytes), bytes([number % 251]) * num_bytes, bytes(4))
    return Round(number, (Draft(0, 1, number, 10 + number, 7, ()),), hidden)


def verdict_of(number: int) -> Verdict:
    return Verdict(number, (Accepted(0, 1, number, 0, (7,)),), 0.25)
