"""The rounds of `docs/protocol.md` over a wire that loses, repeats, delays and replays frames.

Head and tail engines are the real ones; their halves of a model are replaced by ones whose output depends on every
cache position up to the token's own, so a hole, a stale entry or a row mixed up with another changes the text.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.codec import encode
from relay.errors import LinkLost
from relay.messages import (
    Accepted,
    Copy,
    Draft,
    History,
    Prefill,
    Release,
    Round,
    Sampling,
    Tensor,
    TokenLogprobs,
    Verdict,
    Void,
    VoidReason,
)
from relay.transport import Received
from tasks.generation import FailureType, FinishReason, GenerationRequest, GenerationTask, Outcome, StopReason
from tests.pair import Line, Outcomes, options
from workers.head import engine as engine_module
from workers.head import lanes as lanes_module
from workers.head.courier import Courier
from workers.head.drafters import DraftRow, Proposal
from workers.head.engine import HeadEngine
from workers.head.frameroom import FrameRoom
from workers.head.jobs import Job
from workers.head.likelihoods import Likelihoods
from workers.head.options import EngineOptions
from workers.head.spelling import Spelled
from workers.tail.engine import TailEngine
from workers.tail.line import Line as TailLine
from workers.tail.slots import SlotTable
from workers.tail.worker import answer_next

F = TypeVar("F")

VOCAB = 11
MAX_LENGTH = 96
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
#: against logits of 0 and 1: sums of these are exact, and each of them changes texts
PROCESSED = replace(
    GREEDY,
    repetition_penalty=2.0,
    presence_penalty=0.25,
    frequency_penalty=0.125,
    logit_bias=((3, 0.25), (7, -4.0)),
    barred=(5,),
    free_from=45,
    logprobs=2,
)


def next_token(tokens: Sequence[int]) -> int:
    """The reference model: any change in any earlier token changes the rest of the text."""
    return random.Random(str(list(tokens))).randrange(VOCAB)


def checksum(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(token % 256 for token in tokens)) % 2**20  # exact in float32


def chosen_token(tokens: Sequence[int], num_prompt: int, sampling: Sampling) -> int:
    """What the sampling's processors make of the reference model's choice; of equal logits the lowest wins."""
    if not sampling.has_processors:
        return next_token(tokens)
    bias, output, wanted = dict(sampling.logit_bias), tokens[num_prompt:], next_token(tokens)

    def score(token: int) -> float:
        if token in sampling.barred and len(tokens) < sampling.free_from:
            return float("-inf")
        logit = float(token == wanted) / (sampling.repetition_penalty if token in tokens else 1.0)
        count = output.count(token)
        return logit - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0) + bias.get(token, 0)

    return max(range(VOCAB), key=score)


def reference(prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chosen_token(tokens, len(prompt), sampling))
    return tokens[len(prompt) :]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


class FakeHalf:
    """A half whose cache is a list of tokens per slot, read up to the query's own position."""

    hidden_size, vocab_size, max_length, max_query = 2, VOCAB, MAX_LENGTH, 32
    dtype, device = torch.float32, torch.device("cpu")
    #: nothing is recorded
    graphs = None

    def __init__(self, slots: int, shortage: Callable[[], bool] = lambda: False) -> None:
        """`shortage()`: whether there is no memory for the next forward."""
        self.slots = slots
        self.shortage = shortage
        self.cache = torch.full((slots + 1, MAX_LENGTH + 32), -1.0)

    def _write(self, values: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> None:
        if self.shortage():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, 1.00 GiB is free.")
        for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            self.cache[slot, start : start + values.shape[1]] = values[row]

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self.cache[destination, :length] = self.cache[source, :length]

    def zero_slot(self, slot: int) -> None:
        self.cache[slot] = 0


class FakeHead(FakeHalf):
    """Hidden state of a token: the token, and a checksum of the head's cache up to it."""

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        self._write(tokens.float(), slots, starts)
        sums = torch.zeros(tokens.shape)
        for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            for query in range(tokens.shape[1]):
                sums[row, query] = checksum(self.cache[slot, : start + query + 1].int().tolist())
        return torch.stack([tokens.float(), sums], dim=-1)


class FakeTail(FakeHalf):
    """Logits of a position: one-hot of the reference model over the tail's cache, if the head's held the same."""

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        self._write(hidden[..., 0], slots, starts)
        output = torch.zeros(*hidden.shape[:2], 1)
        for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            for query in range(hidden.shape[1]):
                context = self.cache[slot, : start + query + 1].int().tolist()
                intact = checksum(context) == int(hidden[row, query, 1])
                output[row, query, 0] = next_token(context) if intact else next_token([*context, 0])
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


class FakeDrafter:
    """Right with probability `skill`, so that rounds end at every point of a draft."""

    def __init__(self, rng: random.Random, skill: float) -> None:
        self.rng, self.skill = rng, skill

    def begin(self, slot: int) -> None: ...

    def end(self, slot: int) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> Proposal:
        tokens = list(row.tokens)
        for _ in range(row.limit):
            right = chosen_token(tokens, row.num_prompt, row.sampling)
            tokens.append(right if self.rng.random() < self.skill else self.rng.randrange(VOCAB))
        draft = tuple(tokens[len(row.tokens) :])
        return Proposal(draft, (1.0,) * len(draft))


@dataclass
class Ended:
    """A completion that ends at `max_tokens` only."""

    max_tokens: int
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return text_of(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def commit(self, tokens: Sequence[int]) -> FinishReason | None:
        self.tokens.extend(tokens[: self.max_tokens - len(self.tokens)])
        return self.finish_reason

    @property
    def finish_reason(self) -> FinishReason | None:
        return FinishReason.LENGTH if len(self.tokens) == self.max_tokens else None


class BadWire:
    """A link on a simulated clock; every frame may be lost, doubled, delayed, and old ones come again."""

    def __init__(self, tail: TailEngine, rng: random.Random, num_faults: list[int], delay: float = 0.0) -> None:
        """`delay`: how often a read comes before the tail, and before its answers."""
        self.tail, self.rng, self.num_faults, self.delay = tail, rng, num_faults, delay
        self.now = 0.0
        #: of rounds and verdicts
        self.max_frame_bytes: int | None = None
        #: called in the midst of a turn, as if from another thread
        self.meanwhile: Callable[[], None] = lambda: None
        self.up: deque[Prefill | Round | Release] = deque()
        self.line = TailLine()
        self.down: deque[Verdict] = deque()
        self.seen: list[Prefill | Round | Release] = []

    def clock(self) -> float:
        return self.now

    def _pass(self, frames: deque[F], frame: F, old: list[F]) -> None:
        if self.num_faults[0] <= 0 or self.rng.random() < 0.6:
            frames.append(frame)
            return
        self.num_faults[0] -= 1
        fault = self.rng.choice(["lose", "double", "delay", "replay"])
        if fault in ("double", "replay"):
            frames.append(frame)
        if fault == "double":
            frames.append(frame)
        if fault == "delay":
            frames.insert(self.rng.randrange(len(frames) + 1), frame)
        if fault == "replay" and old:
            frames.append(self.rng.choice(old))

    def send(self, lane: int, message: Prefill | Round | Release) -> int:
        self.meanwhile()
        if isinstance(message, Round):
            self._weigh(message)
        self._pass(self.up, message, self.seen)
        self.seen.append(message)
        return 10

    def receive(self, timeout_s: float) -> Received[Verdict] | None:
        self.now += timeout_s
        if self.rng.random() < self.delay:
            return None
        while self.up:
            self.line.put(Received(0, self.up.popleft(), 10, self.now))
        while self.line:
            for _, verdict in answer_next(self.line, self.tail):
                self._weigh(verdict)
                self._pass(self.down, verdict, [])
        return Received(0, self.down.popleft(), 10, self.now) if self.down else None

    def _weigh(self, message: Round | Verdict) -> None:
        """As a real link, which raises FrameInvalid."""
        if self.max_frame_bytes is not None:
            encode(message, self.max_frame_bytes)

    def wake(self) -> None: ...

    def close(self) -> None: ...


def job(number: int, prompt: list[int], max_tokens: int, *, suspect: bool = False, sampling: Sampling = GREEDY) -> Job:
    task = GenerationTask(f"job{number}", 1, "batch", f"c{number}", "m", GenerationRequest("x", None, 0))
    return Job(
        task,
        sampling,
        Ended(max_tokens),  # type: ignore[arg-type]
        list(prompt),
        len(prompt),
        max_tokens,
        suspect=suspect,
        likelihoods=None if sampling.logprobs is None else Likelihoods(letters),  # type: ignore[arg-type]
    )


def letters(token: int) -> Spelled:
    return Spelled(text_of([token]), (ord("a") + token,))


def sampling_of(number: int, processed: set[int]) -> Sampling:
    return PROCESSED if number in processed else GREEDY


#: prompts of other jobs begin like these, and go on their own way
SHARED = (tuple(reference([1], 40)), tuple(reference([2], 40)))

prompts = st.builds(
    lambda shared, length, own: [*SHARED[shared][:length], *own],
    st.integers(0, 1),
    st.sampled_from([0, 17, 40, 40]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
#: prompt, tokens to generate, turn of arrival
arrivals = st.lists(st.tuples(prompts, st.integers(1, 25), st.integers(0, 20)), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(
    jobs=arrivals,
    slots=st.integers(1, 4),
    lanes=st.sampled_from([1, 2, 3, "auto"]),
    draft_length=st.sampled_from([0, 1, 4, 7, "auto"]),
    skill=st.sampled_from([0.0, 0.7, 1.0]),
    prefix_reuse=st.sampled_from([True, True, False]),
    faults=st.integers(0, 40),
    hand_backs=st.integers(0, 2),
    stops=st.dictionaries(st.integers(0, 6), st.integers(0, 30), max_size=3),
    suspects=st.sets(st.integers(0, 6), max_size=2),
    processed=st.sets(st.integers(0, 6), max_size=5),
    shortages=st.sampled_from([0, 0, 1, 3]),
    delay=st.sampled_from([0.0, 0.5, 0.8]),
    max_frame_bytes=st.sampled_from([None, None, 400, 700]),
    seed=st.integers(0, 2**32),
)
def test_every_text_is_the_models_own_whatever_the_wire_does_to_frames_and_the_engine_with_rows(
    jobs: list[tuple[list[int], int, int]],
    slots: int,
    lanes: int | Literal["auto"],
    draft_length: int | Literal["auto"],
    skill: float,
    prefix_reuse: bool,
    faults: int,
    hand_backs: int,
    stops: dict[int, int],
    suspects: set[int],
    processed: set[int],
    shortages: int,
    delay: float,
    max_frame_bytes: int | None,
    seed: int,
) -> None:
    rng = random.Random(seed)
    trial = Trial(rng, slots, Returning(suspects), Shortage(rng, shortages), faults, delay, processed, max_frame_bytes)
    trial.make_engine(
        skill,
        options(slots=slots, draft_length=draft_length, lanes=lanes, prefill_chunk=6, prefix_reuse=prefix_reuse),
    )
    with (
        patch.object(lanes_module, "num_lanes", lambda *_, most, **__: rng.randint(1, most)),
        patch.object(engine_module, "CLEARED_FOR_S", 0.0),
        patch.object(FrameRoom, "chunk", lambda _, most: most),  # chunks of a token each would take too long
        patch.object(engine_module, "MAX_RESTARTS", 100),  # many losses in a row are what this wire is for
    ):
        for number in range(20_000):
            trial.arrive(jobs, number, suspects)
            if hand_backs and rng.random() < 0.02:
                hand_backs -= 1
                trial.engine.hand_back_all()
            trial.stopping = [index for index, begin in stops.items() if begin <= number]
            trial.turn()
            if len(trial.outcomes.finished) == len(jobs):
                break

    ended = [trial.outcomes.finished[f"job{number}.1"] for number in range(len(jobs))]
    for number, ((prompt, count, _), outcome) in enumerate(zip(jobs, ended, strict=True)):
        sampling = sampling_of(number, processed)
        if outcome.failure is None and outcome.stopped is None:
            assert_whole(outcome, prompt, count, sampling)
        else:
            assert_partial(outcome, reference(prompt, count, sampling))
        assert_likelihoods(outcome, prompt, sampling)
    assert {number for number, outcome in enumerate(ended) if outcome.stopped} <= stops.keys()
    failures = [outcome.failure for outcome in ended if outcome.failure]
    assert set(failures) <= {FailureType.OUT_OF_MEMORY}
    assert len(failures) <= shortages // 2  # a job that is alone is tried twice


def assert_whole(outcome: Outcome, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> None:
    """A completed text is the model's own."""
    assert list(outcome.token_ids) == reference(prompt, count, sampling)
    assert outcome.metrics is not None
    assert outcome.metrics.cached_tokens < len(prompt)


def assert_likelihoods(outcome: Outcome, prompt: Sequence[int], sampling: Sampling) -> None:
    """One for each token, of the model's own logits: 1 for what it wants, 0 for every other token."""
    wants_any = sampling.logprobs is not None
    assert [each.chosen.token for each in outcome.logprobs] == (list(outcome.token_ids) if wants_any else [])
    for place, each in enumerate(outcome.logprobs):
        wanted = next_token([*prompt, *outcome.token_ids[:place]])
        likeliest, *others = [other.logprob for other in each.top]
        assert each.top[0].token == wanted
        assert len(others) == 1
        assert likeliest - others[0] == pytest.approx(1.0)
        assert each.chosen.logprob == pytest.approx(likeliest if each.chosen.token == wanted else others[0])


def assert_partial(outcome: Outcome, whole: Sequence[int]) -> None:
    """A text cut short is the beginning of the model's own."""
    assert len(outcome.token_ids) < len(whole)
    assert list(outcome.token_ids) == whole[: len(outcome.token_ids)]
    assert (outcome.text or "") == text_of(outcome.token_ids)
    assert outcome.finish_reason is None


@dataclass
class Trial:
    """A head and its tail on a bad wire; jobs come, are stopped and handed back in between."""

    rng: random.Random
    slots: int
    outcomes: Returning
    shortage: Shortage
    faults: int
    delay: float
    processed: set[int]
    max_frame_bytes: int | None = None
    stopping: list[int] = field(default_factory=list)

    def make_engine(self, skill: float, options: EngineOptions) -> None:
        self.line, self.num_faults, self.tail_half = Line(), [self.faults], FakeTail(self.slots, self.shortage)
        head, drafter = FakeHead(self.slots, self.shortage), FakeDrafter(self.rng, skill)
        self.engine = HeadEngine(head, drafter, self.line, self.outcomes, options)  # type: ignore[arg-type]
        self.connect()

    def connect(self) -> None:
        tail = TailEngine(self.tail_half, slots=self.slots, max_query=32)  # type: ignore[arg-type]
        wire = BadWire(tail, self.rng, self.num_faults, self.delay)
        wire.meanwhile = self.stop_some
        wire.max_frame_bytes = self.max_frame_bytes
        courier = Courier(wire, resend_after_s=1.0, give_up_after_s=5.0, clock=wire.clock)  # type: ignore[arg-type]
        self.engine.open(courier)

    def arrive(self, jobs: Sequence[tuple[list[int], int, int]], turn: int, suspects: set[int]) -> None:
        """The jobs of this turn come, and those that were handed back."""
        arrived = [index for index, (_, _, arrival) in enumerate(jobs) if arrival == turn]
        for index in (*arrived, *self.outcomes.take_returned()):
            sampling = sampling_of(index, self.processed)
            self.line.append(job(index, *jobs[index][:2], suspect=index in suspects, sampling=sampling))

    def stop_some(self) -> None:
        """As the stop watch, which tells again and again."""
        for index in self.stopping:
            if self.rng.random() < 0.5:
                self.engine.stop(f"job{index}.1", StopReason.CANCELLED)

    def turn(self) -> None:
        self.stop_some()
        try:
            self.engine.step()
        except LinkLost:
            self.connect()


class Shortage:
    """A number of times at which there is no memory."""

    def __init__(self, rng: random.Random, left: int) -> None:
        self.rng, self.left = rng, left

    def __call__(self) -> bool:
        short = self.left > 0 and self.rng.random() < 0.1
        self.left -= short
        return short


class Returning(Outcomes):
    """Remembers which jobs were handed back, and sees to it that suspects are alone."""

    def __init__(self, suspects: set[int]) -> None:
        super().__init__()
        self.returned: list[int] = []
        self.suspects = suspects
        self.running: set[int] = set()

    def started(self, task_id: str) -> None:
        super().started(task_id)
        number = number_of(task_id)
        assert not self.running if number in self.suspects else not self.running & self.suspects
        self.running.add(number)

    def finish(self, task_id: str, outcome: Outcome) -> None:
        super().finish(task_id, outcome)
        self.running.discard(number_of(task_id))

    def hand_back(self, task_id: str) -> None:
        self.returned.append(number_of(task_id))
        self.running.discard(number_of(task_id))

    def take_returned(self) -> list[int]:
        returned, self.returned = self.returned, []
        return returned


def number_of(task_id: str) -> int:
    return int(task_id.removeprefix("job").split(".")[0])


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_a_stopped_job_has_at_most_two_more_rounds_and_keeps_the_text_it_has(lanes: int, after: int) -> None:
    slots, outcomes, sent = 3, Outcomes(), [0]
    engine = HeadEngine(
        FakeHead(slots),  # type: ignore[arg-type]
        FakeDrafter(random.Random(1), 0.5),
        Line(job(number, [number, 2, 3], 30) for number in range(slots)),
        outcomes,
        options(slots=slots, draft_length=3, lanes=lanes),
    )
    wire = BadWire(TailEngine(FakeTail(slots), slots=slots, max_query=32), random.Random(0), [0], delay=0.6)  # type: ignore[arg-type]

    def stop_in_the_midst() -> None:
        sent[0] += 1
        if sent[0] == slots + after:  # a prefill each comes first
            engine.stop("job1.1", StopReason.CANCELLED)

    wire.meanwhile = stop_in_the_midst
    engine.open(Courier(wire, clock=wire.clock))  # type: ignore[arg-type]
    while len(outcomes.finished) < slots:
        engine.step()
    later = [frame for frame in wire.seen[slots + after - 1 :] if isinstance(frame, Round) and 1 in _slots_of(frame)]
    assert len(later) <= 2
    stopped = outcomes.finished["job1.1"]
    assert stopped.stopped is StopReason.CANCELLED
    assert_partial(stopped, reference([1, 2, 3], 30))
    for number in (0, 2):
        assert list(outcomes.finished[f"job{number}.1"].token_ids) == reference([number, 2, 3], 30)


def test_a_job_that_waits_is_stopped_without_text_and_one_that_is_not_here_is_no_matter() -> None:
    outcomes = Outcomes()
    engine = engine_of(1, Line([job(0, [1, 2], 5), job(1, [1, 3], 5)]), outcomes)
    engine.step()
    for task_id in ("job1.1", "job7.1", "job1.1"):
        engine.stop(task_id, StopReason.EXPIRED)
    while len(outcomes.finished) < 2:
        engine.step()
    waiting = outcomes.finished["job1.1"]
    assert (waiting.stopped, waiting.text, waiting.metrics) == (StopReason.EXPIRED, None, None)
    assert not waiting.token_ids
    assert list(outcomes.finished["job0.1"].token_ids) == reference([1, 2], 5)


def engine_of(
    slots: int,
    line: Line,
    outcomes: Outcomes,
    *,
    head: FakeHalf | None = None,
    tail: FakeHalf | None = None,
    lanes: int = 1,
) -> HeadEngine:
    """An engine on a good wire to a tail of its own."""
    engine = HeadEngine(
        head or FakeHead(slots),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 0.5),
        line,
        outcomes,
        options(slots=slots, draft_length=3, lanes=lanes),
    )
    tail_engine = TailEngine(tail or FakeTail(slots), slots=slots, max_query=32)  # type: ignore[arg-type]
    wire = BadWire(tail_engine, random.Random(0), [0])
    engine.open(Courier(wire, clock=wire.clock))  # type: ignore[arg-type]
    return engine


class Narrow:
    """There is memory for so many rows in one forward and no more; counts the forwards that found none."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows, self.num_failed = most_rows, 0

    def refuses(self, rows: int) -> None:
        if rows > self.most_rows:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, 1.00 GiB is free.")


class NarrowHead(FakeHead):
    def __init__(self, slots: int, narrow: Narrow) -> None:
        super().__init__(slots)
        self.narrow = narrow

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        self.narrow.refuses(len(tokens))
        return super().forward(tokens, slots, starts)


class NarrowTail(FakeTail):
    def __init__(self, slots: int, narrow: Narrow) -> None:
        super().__init__(slots)
        self.narrow = narrow

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        self.narrow.refuses(len(hidden))
        return super().forward(hidden, slots, starts)


@pytest.mark.parametrize("half", ["head", "tail"])
@pytest.mark.parametrize("most_rows", [1, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_jobs_for_which_there_is_no_memory_together_are_done_fewer_at_a_time_and_none_fails(
    half: str, most_rows: int, lanes: int
) -> None:
    slots, num_jobs, outcomes, narrow = 6, 9, Outcomes(), Narrow(most_rows)
    prompts = [[number] * (2 + 3 * number) for number in range(num_jobs)]
    line = Line(job(number, prompt, 8) for number, prompt in enumerate(prompts))
    engine = engine_of(
        slots,
        line,
        outcomes,
        lanes=lanes,
        head=NarrowHead(slots, narrow) if half == "head" else None,
        tail=NarrowTail(slots, narrow) if half == "tail" else None,
    )
    while len(outcomes.finished) < num_jobs:
        engine.step()
    for number, prompt in enumerate(prompts):
        outcome = outcomes.finished[f"job{number}.1"]
        assert outcome.failure is None, outcome.failure_message
        assert list(outcome.token_ids) == reference(prompt, 8)
    assert 1 <= narrow.num_failed <= 20  # the tail first tries rounds together that wait together
    assert sorted(outcomes.begun) == [f"job{number}.1" for number in range(num_jobs)]  # each was told of once


def test_a_job_for_which_there_is_no_memory_even_alone_fails_with_the_numbers_and_no_other_one() -> None:
    class ShortHead(FakeHead):
        def forward(self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            if int(starts.max()) + tokens.shape[1] > 40:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, 1.00 GiB is free.")
            return super().forward(tokens, slots, starts)

    outcomes = Outcomes()
    prompts = [[1] * 4, [2] * 45, [3] * 9, [4] * 6]
    line = Line(job(number, prompt, 8) for number, prompt in enumerate(prompts))
    engine = engine_of(3, line, outcomes, head=ShortHead(3))
    while len(outcomes.finished) < len(prompts):
        engine.step()
    failed = outcomes.finished["job1.1"]
    assert failed.failure is FailureType.OUT_OF_MEMORY
    assert failed.failure_message is not None
    assert "Tried to allocate 2.00 GiB" in failed.failure_message
    for number in (0, 2, 3):
        assert list(outcomes.finished[f"job{number}.1"].token_ids) == reference(prompts[number], 8)


def test_a_single_lack_of_memory_costs_a_lone_job_nothing_but_time() -> None:
    outcomes, head = Outcomes(), FakeHead(1)
    engine = engine_of(1, Line([job(0, [5, 6], 8)]), outcomes, head=head)
    shortage = Shortage(random.Random(0), 1)
    shortage.rng.random = lambda: 0.0  # type: ignore[method-assign]
    head.shortage = shortage
    while not outcomes.finished:
        engine.step()
    assert shortage.left == 0
    assert list(outcomes.finished["job0.1"].token_ids) == reference([5, 6], 8)


def test_a_stopped_job_that_waits_for_memory_keeps_the_text_it_has() -> None:
    narrow, outcomes = Narrow(99), Outcomes()
    engine = engine_of(2, Line([job(0, [1, 2], 30), job(1, [1, 3], 30)]), outcomes, head=NarrowHead(2, narrow))
    while engine._scheduler.num_rows < 2:
        engine.step()
    narrow.most_rows = 1
    while not engine._scheduler.num_waiting:
        engine.step()
    (waiting,) = {"job0.1", "job1.1"} - {slot.job.task_id for slot in engine._scheduler.live() if slot.job}
    engine.stop(waiting, StopReason.CANCELLED)
    engine.step()
    outcome = outcomes.finished[waiting]
    assert outcome.token_ids
    assert_partial(outcome, reference([1, 2] if waiting == "job0.1" else [1, 3], 30))


def test_with_a_tail_of_fewer_slots_the_jobs_beyond_wait_for_one() -> None:
    outcomes = Outcomes()
    engine = engine_of(4, Line(job(number, [number, 2], 12) for number in range(6)), outcomes)
    while engine._scheduler.num_rows < 4:
        engine.step()
    tail = TailEngine(FakeTail(2), slots=2, max_query=32)  # type: ignore[arg-type]
    wire = BadWire(tail, random.Random(0), [0])
    engine.open(Courier(wire, clock=wire.clock), 2)  # type: ignore[arg-type]
    while len(outcomes.finished) < 6:
        engine.step()
        assert all(slot.index < 2 for slot in engine._scheduler.live())
    for number in range(6):
        assert list(outcomes.finished[f"job{number}.1"].token_ids) == reference([number, 2], 12)


def test_a_perfect_drafter_on_a_good_wire_commits_a_full_draft_and_one_token_every_round() -> None:
    outcomes = Outcomes()
    engine = HeadEngine(
        FakeHead(1),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 1.0),
        Line([job(0, [1, 2, 3], 1 + 5 * 4)]),
        outcomes,
        options(slots=1, draft_length=4, lanes=1, prefill_chunk=64),
    )
    wire = BadWire(TailEngine(FakeTail(1), slots=1, max_query=32), random.Random(0), [0])  # type: ignore[arg-type]
    engine.open(Courier(wire, clock=wire.clock))  # type: ignore[arg-type]
    while not outcomes.finished:
        engine.step()
    metrics = outcomes.finished["job0.1"].metrics
    assert metrics is not None
    assert (metrics.rounds, metrics.tokens_per_round, metrics.accepted, metrics.drafted) == (4, 5.0, 16, 16)


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
@pytest.mark.parametrize("max_frame_bytes", [None, 700])
def test_no_row_waits_more_than_twice_as_long_as_rows_do_on_average(lanes: int, max_frame_bytes: int | None) -> None:
    slots, outcomes = 7, Outcomes()
    engine = HeadEngine(
        FakeHead(slots),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 0.5),
        Line(job(number, [number, 2, 3], 30) for number in range(slots)),
        outcomes,
        options(slots=slots, draft_length=3, lanes=lanes),
    )
    wire = BadWire(TailEngine(FakeTail(slots), slots=slots, max_query=32), random.Random(0), [0], delay=0.6)  # type: ignore[arg-type]
    wire.max_frame_bytes = max_frame_bytes
    engine.open(Courier(wire, clock=wire.clock))  # type: ignore[arg-type]
    while not outcomes.finished:
        engine.step()
    rounds = [frame for frame in wire.seen if isinstance(frame, Round)]
    turns = [[place for place, frame in enumerate(rounds) if slot in _slots_of(frame)] for slot in range(slots)]
    gaps = [after - before for places in turns for before, after in pairwise(places)]
    assert max(gaps) <= 2 * sum(gaps) / len(gaps) + 1  # frames are whole


def test_rows_and_drafts_that_a_frame_does_not_hold_wait_for_the_next_round_and_no_text_changes() -> None:
    slots, outcomes = 6, Outcomes()
    engine = HeadEngine(
        FakeHead(slots),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 0.7),
        Line(job(number, [number, 2, 3], 60, sampling=sampling_of(number, {0, 3})) for number in range(slots)),
        outcomes,
        options(slots=slots, draft_length=16, lanes=1),
    )
    wire = BadWire(TailEngine(FakeTail(slots), slots=slots, max_query=32), random.Random(0), [0])  # type: ignore[arg-type]
    wire.max_frame_bytes = 1200
    engine.open(Courier(wire, clock=wire.clock))  # type: ignore[arg-type]
    with patch.object(FrameRoom, "chunk", lambda _, most: most):
        while len(outcomes.finished) < slots:
            engine.step()
    for number in range(slots):
        assert_whole(outcomes.finished[f"job{number}.1"], [number, 2, 3], 60, sampling_of(number, {0, 3}))
    rounds = [frame for frame in wire.seen if isinstance(frame, Round)]
    assert max(len(frame.rows) for frame in rounds) == 4
    assert 4 < max(frame.hidden.shape[0] for frame in rounds if len(frame.rows) == 4) < 4 * 17


def _slots_of(frame: Round) -> set[int]:
    return {row.slot for row in frame.rows}


# -- verdicts that are none ---------------------------------------------------------------------------------------


def first_row(verdict: Verdict, **changes: object) -> Verdict:
    row = replace(verdict.rows[0], **changes)  # type: ignore[arg-type]
    return replace(verdict, rows=(row, *verdict.rows[1:]))


def told(verdict: Verdict, logprobs: TokenLogprobs) -> Verdict:
    row = verdict.rows[0]
    return first_row(verdict, logprobs=(logprobs,) * len(row.logprobs)) if isinstance(row, Accepted) else verdict


LIES: dict[str, Callable[[Verdict], Verdict]] = {
    "no rows": lambda verdict: replace(verdict, rows=()),
    "too many rows": lambda verdict: replace(verdict, rows=verdict.rows * 2),
    "a slot that is none": lambda verdict: first_row(verdict, slot=2**31 - 1),
    "another generation": lambda verdict: first_row(verdict, generation=10**9),
    "another round": lambda verdict: first_row(verdict, round=10**9),
    "more than was drafted": lambda verdict: first_row(verdict, accepted=1024, tokens=(1,) * 1025),
    "no token": lambda verdict: first_row(verdict, accepted=0, tokens=()),
    "too many tokens": lambda verdict: first_row(verdict, tokens=(1,) * 1024),
    "a token of no vocabulary": lambda verdict: first_row(verdict, accepted=0, tokens=(VOCAB,)),
    "a likeliest token of no vocabulary": lambda verdict: told(verdict, TokenLogprobs(0.0, (1, VOCAB), (0.0, -1.0))),
    "fewer likeliest tokens than asked for": lambda verdict: told(verdict, TokenLogprobs(0.0, (1,), (0.0,))),
    "no log probabilities": lambda verdict: first_row(verdict, logprobs=()),
    "a frame that was never sent": lambda verdict: replace(verdict, number=10**9),
}


class LyingWire(BadWire):
    """Nothing is lost, but before each verdict comes a lie about the same frame."""

    lie: Callable[[Verdict], Verdict]

    def _pass(self, frames: deque[F], frame: F, old: list[F]) -> None:
        if isinstance(frame, Verdict) and all(isinstance(row, Accepted) for row in frame.rows):
            lie = self.lie(frame)
            if lie != frame:
                frames.append(lie)  # type: ignore[arg-type]
        frames.append(frame)


@pytest.mark.parametrize("lie", LIES)
def test_a_verdict_that_does_not_answer_its_frame_is_dropped_with_a_reason_and_the_next_one_counts(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    slots, outcomes = 3, Outcomes()
    engine = HeadEngine(
        FakeHead(slots),  # type: ignore[arg-type]
        FakeDrafter(random.Random(0), 0.5),
        Line(job(number, [number] * (5 + 9 * number), 12, sampling=PROCESSED) for number in range(slots)),
        outcomes,
        options(slots=slots, draft_length=3, lanes=2, prefill_chunk=6),
    )
    wire = LyingWire(TailEngine(FakeTail(slots), slots=slots, max_query=32), random.Random(0), [0])  # type: ignore[arg-type]
    wire.lie = LIES[lie]
    engine.open(Courier(wire, vocab_size=engine.vocab_size, clock=wire.clock))  # type: ignore[arg-type]
    while len(outcomes.finished) < slots:
        engine.step()
    for number in range(slots):
        prompt, outcome = [number] * (5 + 9 * number), outcomes.finished[f"job{number}.1"]
        assert_whole(outcome, prompt, 12, PROCESSED)
        assert_likelihoods(outcome, prompt, PROCESSED)
    assert ("dropped" in caplog.text) == (lie != "a frame that was never sent")


# -- the tail's slot table, transition by transition ------------------------------------------------------------


def chunk(
    slot: int = 0, generation: int = 0, number: int = 0, position: int = 0, *, length: int = 3, **more: object
) -> Prefill:
    fields = {"number": 1, "token": 7, "last": False, "sampling": GREEDY, "copy": None, **more}
    hidden = Tensor("float32", (length, 1), bytes(4 * length))
    return Prefill(slot=slot, generation=generation, round=number, position=position, hidden=hidden, **fields)  # type: ignore[arg-type]


def prefilled_table() -> SlotTable:
    """Slot 0: generation 0, prefilled with 3 tokens in round 0, base token 5."""
    table = SlotTable(2, max_length=16, max_query=4, vocab_size=VOCAB)
    first = chunk(last=True)
    assert table.judge(first) is None
    table.prefilled(first, 5)
    return table


def test_a_row_that_fits_is_let_through_and_its_repetition_gets_the_stored_answer() -> None:
    table = prefilled_table()
    row = Draft(0, 0, 1, 3, 5, (1, 2))
    assert table.judge(row) is None
    answer = table.verified(row, 1, 9)
    assert answer == Accepted(0, 0, 1, 1, (1, 9))
    assert table.judge(row) == answer
    assert table.judge(Draft(0, 0, 2, 5, 9, ())) is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Draft(0, 1, 1, 3, 5, ()), VoidReason.GENERATION),
        (Draft(1, 0, 1, 3, 5, ()), VoidReason.GENERATION),
        (Draft(0, 0, 2, 3, 5, ()), VoidReason.ROUND),
        (Draft(0, 0, 1, 4, 5, ()), VoidReason.BASE),
        (Draft(0, 0, 1, 3, 6, ()), VoidReason.BASE),
        (Draft(0, 0, 1, 3, 5, (1, 2, 3, 4)), VoidReason.BOUNDS),
        (Draft(0, 0, 1, 3, 5, (VOCAB,)), VoidReason.BOUNDS),
        (Draft(2, 0, 1, 3, 5, ()), VoidReason.BOUNDS),
        (Draft(-1, 0, 1, 3, 5, ()), VoidReason.BOUNDS),
        (chunk(number=1, position=3), VoidReason.BASE),
        (chunk(generation=0, number=3), VoidReason.ROUND),
        (chunk(slot=1, position=1), VoidReason.BASE),
        (chunk(slot=1, length=5), VoidReason.BOUNDS),
        (chunk(slot=1, length=0), VoidReason.BOUNDS),
        (chunk(slot=1, sampling=replace(PROCESSED, barred=(VOCAB,))), VoidReason.BOUNDS),
        (chunk(slot=1, sampling=replace(PROCESSED, logit_bias=((VOCAB, 1.0),))), VoidReason.BOUNDS),
        (chunk(slot=1, sampling=PROCESSED), None),
        (chunk(slot=1, sampling=PROCESSED, last=True), VoidReason.BOUNDS),
        (chunk(slot=1, sampling=PROCESSED, last=True, history=History((1,), ())), None),
        (chunk(slot=1, sampling=PROCESSED, last=True, history=History((VOCAB,), ())), VoidReason.BOUNDS),
        (chunk(slot=1, sampling=PROCESSED, last=True, history=History((), (VOCAB,))), VoidReason.BOUNDS),
        (chunk(slot=1, position=3, copy=Copy(0, 0, 3)), None),
        (chunk(slot=1, position=3, copy=Copy(0, 1, 3)), VoidReason.COPY),
        (chunk(slot=1, position=4, copy=Copy(0, 0, 4)), VoidReason.COPY),
        (chunk(slot=1, position=2, copy=Copy(0, 0, 3)), VoidReason.BASE),
        (chunk(slot=1, position=3, copy=Copy(5, 0, 3)), VoidReason.COPY),
        (chunk(generation=1, position=2, copy=Copy(0, 0, 2)), None),
        (chunk(generation=1, position=2, copy=Copy(0, 1, 2)), VoidReason.COPY),
        (chunk(generation=1, position=4, copy=Copy(0, 0, 4)), VoidReason.COPY),
        (Release(1, 0, 0, 1), None),
        (Release(1, 0, 1, 1), VoidReason.GENERATION),
    ],
)
def test_a_row_that_does_not_fit_the_slot_is_void_with_the_reason(
    row: Draft | Prefill | Release, reason: VoidReason | None
) -> None:
    judged = prefilled_table().judge(row)
    assert judged == (None if reason is None else Void(row.slot, row.generation, row.round, reason))


def test_a_stale_first_chunk_of_an_earlier_generation_does_not_reset_the_slot() -> None:
    table = prefilled_table()
    second = chunk(generation=1, last=True)
    assert table.judge(second) is None
    table.prefilled(second, 4)
    assert table.judge(chunk(last=True)) == Void(0, 0, 0, VoidReason.GENERATION)


def test_after_non_finite_logits_the_generation_is_over_and_its_answer_is_remembered() -> None:
    table = prefilled_table()
    row = Draft(0, 0, 1, 3, 5, ())
    answer = table.spoiled(row, VoidReason.NON_FINITE)
    assert answer.reason is VoidReason.NON_FINITE
    assert table.judge(row) == answer
    assert table.judge(Draft(0, 0, 2, 3, 5, ())) == Void(0, 0, 2, VoidReason.BASE)
    assert table.judge(chunk(generation=1)) is None


def test_a_released_slot_takes_no_more_rounds_of_that_generation() -> None:
    table = prefilled_table()
    table.released(Release(1, 0, 0, 1))
    assert table.judge(Draft(0, 0, 2, 0, 5, ())) == Void(0, 0, 2, VoidReason.BASE)
