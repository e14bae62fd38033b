"""Which verdicts the head takes for answers to the frames it has sent."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from relay.messages import Accepted, Draft, Message, Prefill, Round, Sampling, Tensor, TokenLogprobs, Verdict
from relay.transport import Received
from workers.head.courier import Courier

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
HIDDEN = Tensor("float32", (1, 1), bytes(4))


class Link:
    """Gives back what it is told to."""

    def __init__(self) -> None:
        self.verdicts: deque[Verdict] = deque()

    def send(self, lane: int, message: Message) -> int:
        return 1

    def receive(self, timeout_s: float) -> Received[Verdict] | None:
        return Received(0, self.verdicts.popleft(), 1, 0.0) if self.verdicts else None


def last_chunk(courier: Courier, generation: int, sampling: Sampling) -> Prefill:
    return Prefill(courier.next_number(), 0, generation, 0, 0, 3, True, sampling, None, None, HIDDEN)


def test_a_round_is_answered_as_its_own_job_asked_although_the_slot_has_another_one_by_now() -> None:
    link = Link()
    courier = Courier(link, clock=lambda: 0.0)  # type: ignore[arg-type]
    courier.send(0, last_chunk(courier, 0, replace(GREEDY, logprobs=1)))
    round_ = Round(courier.next_number(), (Draft(0, 0, 1, 1, 3, ()),), HIDDEN)
    courier.send(0, round_)
    courier.send(0, last_chunk(courier, 1, GREEDY))

    told = TokenLogprobs(-0.5, (7,), (-0.25,))
    link.verdicts += [
        Verdict(round_.number, (Accepted(0, 0, 1, 0, (5,)),), 0.1),
        Verdict(round_.number, (Accepted(0, 0, 1, 0, (5,), (told,)),), 0.1),
    ]
    assert courier.receive(0.0) is None
    answered = courier.receive(0.0)
    assert answered is not None
    assert answered.frame is round_
