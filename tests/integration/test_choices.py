"""Several completions of one prompt: a slot each, the texts that jobs of their own would have, one outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from relay.messages import VoidReason
from tasks.generation import FailureType, GenerationRequest, GenerationTask, Outcome, StopReason
from tests.models import tiny_model
from tests.pair import Halves, Line, Outcomes, UncutModel, generate, options, session, tasks_for
from tests.parity import MIN_GAP
from workers.head.drafters import Drafter, make_drafter
from workers.head.engine import HeadEngine
from workers.head.ensemble import Ensemble

SLOTS = 4
#: longer than what is worth waiting for
LONG = "The seven of them went down to the river, as they did every day, and there they "
SAMPLED = GenerationRequest(LONG, None, 5, 12, temperature=0.8, top_k=40)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return Halves.load(tiny_model(tmp_path_factory.mktemp("model"), "llama"), 2, slots=SLOTS, max_length=128)


def drafter(halves: Halves, kind: str = "none") -> Drafter:
    return make_drafter(
        kind,  # type: ignore[arg-type]
        target=halves.directory,
        drafter=halves.directory if kind == "model" else None,
        dtype="float32",
        device="cpu",
        slots=SLOTS,
        max_length=128,
    )


def texts(outcome: Outcome) -> list[str | None]:
    return [outcome.text, *(choice.text for choice in outcome.choices)]


def tokens(outcome: Outcome) -> list[tuple[int, ...]]:
    return [outcome.token_ids, *(choice.token_ids for choice in outcome.choices)]


def alone(request: GenerationRequest) -> list[GenerationRequest]:
    """A request of its own for each choice."""
    return [request.of_choice(choice) for choice in range(request.n)]


@pytest.mark.parametrize(("kind", "draft_length"), [("none", 0), ("ngram", 4), ("model", 4), ("model", 8)])
@pytest.mark.parametrize("num_choices", [3, 2 * SLOTS + 1])
def test_a_choice_is_the_text_of_a_job_with_its_seed(
    halves: Halves, kind: str, draft_length: int, num_choices: int
) -> None:
    request = replace(SAMPLED, n=num_choices)
    uncut = UncutModel(halves.directory, halves.prompts)
    references = [uncut.answer(task) for task in tasks_for(alone(request))]
    fair = [number for number, reference in enumerate(references) if reference.gap > MIN_GAP]
    assert len(fair) > num_choices // 2
    others = [replace(SAMPLED, seed=seed, prompt="Something else") for seed in range(2)]

    (outcome, *_) = generate(
        halves,
        tasks_for([request, *others]),
        drafter(halves, kind),
        draft_length=draft_length,
        concurrency=SLOTS,
        lanes=2,
    )

    written = tokens(outcome)
    assert len(written) == num_choices
    assert len(set(written)) == num_choices
    for number in fair:
        assert written[number] == references[number].tokens
    singles = generate(halves, tasks_for(alone(request)), drafter(halves), draft_length=0, concurrency=2)
    assert [single.text for single in singles] == texts(outcome)
    assert [single.finish_reason for single in singles] == [
        outcome.finish_reason,
        *(choice.finish_reason for choice in outcome.choices),
    ]


def test_the_prompt_is_sent_once_and_the_figures_cover_all_choices(halves: Halves) -> None:
    several = replace(SAMPLED, n=SLOTS, ignore_eos=True)
    (outcome,) = generate(halves, tasks_for([several]), drafter(halves), draft_length=0, concurrency=SLOTS)
    singles = generate(
        halves, tasks_for(alone(several)), drafter(halves), draft_length=0, concurrency=SLOTS, prefix_reuse=False
    )
    together, apart = outcome.metrics, [single.metrics for single in singles]
    assert together is not None
    assert outcome.num_tokens == SLOTS * 12
    assert together.rounds == sum(metrics.rounds for metrics in apart if metrics is not None) == SLOTS * 11
    assert together.tokens_per_round == 1.0
    prefill, sent = singles[0].prompt_tokens, together.wire_bytes_up
    row = sum(metrics.wire_bytes_up for metrics in apart if metrics is not None) / (SLOTS * (prefill + 11))
    # the prompt once; the ends that each choice sends of it come to less than another prompt
    assert sent < row * (2 * prefill + SLOTS * 11)
    assert together.cached_tokens == 0


class Told(Outcomes):
    """Also collects what is handed back."""

    def __init__(self) -> None:
        super().__init__()
        self.handed_back: list[str] = []

    def hand_back(self, task_id: str) -> None:
        self.handed_back.append(task_id)


class Bench:
    """An engine at work on a line that the test fills."""

    def __init__(self, halves: Halves, slots: int) -> None:
        self.halves = halves
        self.line, self.told = Line(), Told()
        self.engine = HeadEngine(
            halves.head, drafter(halves, "ngram"), self.line, self.told, options(slots=slots, draft_length=2, lanes=1)
        )

    def bring(self, tasks: Sequence[GenerationTask], *, suspect: bool = False) -> None:
        for task in tasks:
            ensemble = self.halves.prompts.read_all(task)
            for job in ensemble.jobs:
                job.suspect = suspect
            self.line.append(ensemble)

    def work(self, num_finished: int) -> dict[str, Outcome]:
        while len(self.told.finished) < num_finished:
            self.engine.step()
        return self.told.finished

    def turn(self, until_tokens: int) -> None:
        """Work until that many tokens stand in the slots."""
        while sum(slot.job.completion.num_tokens for slot in self.engine._scheduler.live() if slot.job) < until_tokens:
            self.engine.step()


@contextmanager
def bench(halves: Halves, slots: int) -> Iterator[Bench]:
    made = Bench(halves, slots)
    with session(halves, slots, 1) as courier:
        made.engine.open(courier)
        yield made


@pytest.fixture(scope="module")
def undisturbed(halves: Halves) -> list[str | None]:
    (outcome,) = generate(
        halves, tasks_for([replace(SAMPLED, n=5)]), drafter(halves), draft_length=0, concurrency=SLOTS
    )
    return texts(outcome)


@pytest.mark.parametrize("until_tokens", [0, 4, 20])
def test_a_stop_ends_every_choice_at_once_and_is_reported_once(halves: Halves, until_tokens: int) -> None:
    first, second = tasks_for([replace(SAMPLED, n=5), SAMPLED])
    with bench(halves, 3) as at:
        at.bring([first, second])
        at.turn(until_tokens)
        at.engine.stop(first.task_id, StopReason.CANCELLED)
        finished = at.work(2)
        assert at.engine.stats().running == at.engine.stats().waiting == 0
    stopped = finished[first.task_id]
    assert (stopped.stopped, stopped.choices, stopped.finish_reason) == (StopReason.CANCELLED, (), None)
    assert (stopped.text is None) == (until_tokens == 0)
    assert finished[second.task_id].failure is None


def test_a_new_epoch_begins_every_choice_anew_and_changes_no_text(
    halves: Halves, undisturbed: list[str | None]
) -> None:
    (task,) = tasks_for([replace(SAMPLED, n=5)])
    at = Bench(halves, 3)
    at.bring([task])
    with session(halves, 3, 1) as courier:
        at.engine.open(courier)
        at.turn(20)
    with session(halves, 3, 1) as courier:
        at.engine.open(courier)
        finished = at.work(1)
    assert texts(finished[task.task_id]) == undisturbed
    assert at.told.begun == [task.task_id]


def test_what_has_begun_is_not_handed_back_with_the_line_and_everything_is_handed_back_once(halves: Halves) -> None:
    begun, waiting = tasks_for([replace(SAMPLED, n=5), replace(SAMPLED, n=2)])
    with bench(halves, 2) as at:
        at.bring([begun, waiting])
        at.turn(3)
        at.engine.hand_back_waiting()
        assert at.told.handed_back == [waiting.task_id]
        at.engine.hand_back_all()
        assert at.told.handed_back == [waiting.task_id, begun.task_id]
        assert at.engine.stats().running == at.engine.stats().waiting == 0
    assert not at.told.finished


def test_a_suspect_runs_with_all_its_choices_and_nobody_else(halves: Halves, undisturbed: list[str | None]) -> None:
    suspect, other = tasks_for([replace(SAMPLED, n=5), replace(SAMPLED, n=2)])
    with bench(halves, 2) as at:
        at.bring([suspect], suspect=True)
        at.bring([other])
        finished = at.work(1)
    assert texts(finished[suspect.task_id]) == undisturbed
    assert at.told.handed_back == [other.task_id]


def test_one_failed_choice_fails_the_task_and_no_other(halves: Halves) -> None:
    bad, good = tasks_for([replace(SAMPLED, n=3), SAMPLED])
    with bench(halves, SLOTS) as at:
        at.bring([bad, good])
        at.turn(8)
        second = at.engine._roster._tasks[bad.task_id].jobs[1]
        (slot,) = [slot for slot in at.engine._scheduler.live() if slot.job is second]
        at.engine._voided(slot, VoidReason.BOUNDS)
        finished = at.work(2)
        assert at.engine.stats().running == 0
    assert (finished[bad.task_id].failure, finished[bad.task_id].choices) == (FailureType.INTERNAL, ())
    assert finished[good.task_id].failure is None


def test_an_ensemble_of_one_is_a_job_as_ever(halves: Halves) -> None:
    (task,) = tasks_for([SAMPLED])
    ensemble = halves.prompts.read_all(task)
    assert isinstance(ensemble, Ensemble)
    assert [job.sampling.seed for job in ensemble.jobs] == [5]
    (outcome,) = generate(halves, [task], drafter(halves), draft_length=0, concurrency=1)
    assert outcome.choices == ()
