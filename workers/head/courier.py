"""The head's side of a link: numbers frames, pairs each with its verdict, resends what stays unanswered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from relay.errors import LinkLost
from relay.messages import Accepted, Draft, Error, Prefill, Release, Round, Verdict
from relay.transport import HeadLink

log = logging.getLogger(__name__)

#: an unanswered frame is sent again after this long; the tail answers a repeated frame from its memory
RESEND_AFTER_S = 5.0
#: and the epoch is given up after this long without an answer
GIVE_UP_AFTER_S = 30.0

#: no vocabulary is larger: token ids have 31 bits on the wire
ANY_TOKEN = 2**31

Frame = Prefill | Round | Release


class TailSilent(LinkLost):
    """The tail is there but did not answer a frame in time: it may be stuck, or only slow."""


@dataclass(slots=True)
class InFlight:
    """A frame on its way."""

    lane: int
    frame: Frame
    #: by row: likeliest tokens wanted at each position, None for no log probabilities
    num_top: tuple[int | None, ...]
    first_sent: float
    last_sent: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A frame with its verdict."""

    lane: int
    frame: Frame
    verdict: Verdict
    #: `time.perf_counter` when the frame was sent first and when its verdict had arrived
    sent_at: float
    arrived_at: float
    bytes_up: int
    bytes_down: int
    #: sent more than once: its times tell nothing of the link
    resent: bool

    @property
    def link_s(self) -> float:
        """Seconds on the way, there and back: without those at the tail, and those the verdict waited for us."""
        at_tail = self.verdict.tail_s + self.verdict.waited_s
        return max(0.0, self.arrived_at - self.sent_at - at_tail)


class Courier:
    """One epoch's traffic. Not thread-safe: the engine's loop owns it."""

    def __init__(
        self,
        link: HeadLink,
        *,
        resend_after_s: float = RESEND_AFTER_S,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        vocab_size: int = ANY_TOKEN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab_size`: token ids of verdicts are below it."""
        self._link = link
        self._vocab_size = vocab_size
        self._resend_after_s = resend_after_s
        self.give_up_after_s = give_up_after_s
        self._clock = clock
        self._number = 0
        self._in_flight: dict[int, InFlight] = {}
        #: by slot, from its newest last chunk on: likeliest tokens wanted at each position, None for no logprobs
        self._num_top: dict[int, int | None] = {}

    @property
    def max_frame_bytes(self) -> int | None:
        """As `HeadLink.max_frame_bytes`."""
        return self._link.max_frame_bytes

    def next_number(self) -> int:
        """A fresh frame number."""
        self._number += 1
        return self._number

    def send(self, lane: int, frame: Frame) -> int:
        """Send a frame and await its verdict; returns the frame's size in bytes."""
        now = self._clock()
        if isinstance(frame, Prefill) and frame.last:
            self._num_top[frame.slot] = frame.sampling.logprobs
        num_bytes = self._link.send(lane, frame)
        wanted = tuple(self._num_top.get(row.slot) for row in _rows(frame))
        self._in_flight[frame.number] = InFlight(lane, frame, wanted, now, now, num_bytes)
        return num_bytes

    def receive(self, timeout_s: float) -> Answered | None:
        """The next verdict on a frame in flight; None after `timeout_s`, or earlier after `wake`.

        A verdict that is no answer to its frame is dropped with a logged reason: the frame is sent again.

        Raises:
            LinkLost: the transport broke, the tail gave the epoch up, or a frame stayed unanswered for too long.
        """
        self._resend_overdue()
        received = self._link.receive(timeout_s)
        if received is None:
            return None
        if isinstance(received.message, Error):
            raise LinkLost(f"the tail ended the epoch: {received.message.message}")
        if not isinstance(received.message, Verdict):
            return None
        verdict = received.message
        in_flight = self._in_flight.get(verdict.number)
        if in_flight is None:  # the second answer to a frame that was sent twice
            return None
        problem = misfit(in_flight.frame, verdict, self._vocab_size, in_flight.num_top)
        if problem is not None:
            log.warning("verdict on frame %d dropped: %s", verdict.number, problem)
            return None
        del self._in_flight[verdict.number]
        return Answered(
            lane=in_flight.lane,
            frame=in_flight.frame,
            verdict=verdict,
            sent_at=in_flight.first_sent,
            arrived_at=received.at,
            bytes_up=in_flight.num_bytes,
            bytes_down=received.num_bytes,
            resent=in_flight.last_sent != in_flight.first_sent,
        )

    def wake(self) -> None:
        """From any thread: `receive` shall return at once, this time or the next."""
        self._link.wake()

    def _resend_overdue(self) -> None:
        now = self._clock()
        for in_flight in self._in_flight.values():
            if now - in_flight.first_sent > self.give_up_after_s:
                raise TailSilent(f"frame {in_flight.frame.number} had no answer for {self.give_up_after_s:g} s")
            if now - in_flight.last_sent > self._resend_after_s:
                in_flight.last_sent = now
                in_flight.num_bytes += self._link.send(in_flight.lane, in_flight.frame)


def misfit(frame: Frame, verdict: Verdict, vocab_size: int, num_top: Sequence[int | None]) -> str | None:
    """Why a verdict is no answer to this frame; None if it is one. `num_top`: as of `InFlight`."""
    rows = _rows(frame)
    if len(verdict.rows) != len(rows):
        return f"it answers {len(verdict.rows)} rows of {len(rows)}"
    for row, answer, wanted in zip(rows, verdict.rows, num_top, strict=True):
        if (answer.slot, answer.generation, answer.round) != (row.slot, row.generation, row.round):
            return f"its answer for slot {row.slot} belongs to another row"
        if not isinstance(answer, Accepted):
            continue
        if not _answers(row, answer):
            return f"what it accepts for slot {row.slot} was not proposed"
        if any(token >= vocab_size for token in _tokens_of(answer)):
            return f"a token for slot {row.slot} is not in the vocabulary of {vocab_size}"
        if not _has_logprobs(answer, wanted, vocab_size):
            return f"the log probabilities for slot {row.slot} are not those asked for"
    return None


def _rows(frame: Frame) -> Sequence[Draft | Prefill | Release]:
    return frame.rows if isinstance(frame, Round) else (frame,)


def _tokens_of(answer: Accepted) -> Iterator[int]:
    yield from answer.tokens
    for logprobs in answer.logprobs:
        yield from logprobs.top


def _has_logprobs(answer: Accepted, num_top: int | None, vocab_size: int) -> bool:
    """Whether there are log probabilities for every token, of so many likeliest ones, or none if `num_top` is None."""
    if num_top is None:
        return not answer.logprobs
    wanted = min(num_top, vocab_size)
    return len(answer.logprobs) == len(answer.tokens) and all(len(each.top) == wanted for each in answer.logprobs)


def _answers(row: Draft | Prefill | Release, answer: Accepted) -> bool:
    """Whether so many tokens can have been accepted of this row."""
    if isinstance(row, Draft):
        accepted = row.draft[: answer.accepted]
        return len(accepted) == answer.accepted == len(answer.tokens) - 1 and answer.tokens[:-1] == accepted
    return answer.accepted == 0 and len(answer.tokens) == (isinstance(row, Prefill) and row.last)
