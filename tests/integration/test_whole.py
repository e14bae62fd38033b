"""Head and tail in one process write what a split pair and the uncut model write."""

from __future__ import annotations

import pytest

from tasks.generation import GenerationRequest
from tests.models import tiny_model
from tests.pair import Halves, UncutModel, generate, tasks_for
from tests.parity import MIN_GAP, greedy_requests, sampled_requests
from workers.head.drafters import Drafter, DrafterKind, make_drafter

SLOTS = 5


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return Halves.load(tiny_model(tmp_path_factory.mktemp("tiny"), "llama"), 2, slots=SLOTS, max_length=256)


def drafter(halves: Halves, kind: DrafterKind) -> Drafter:
    return make_drafter(
        kind,
        target=halves.directory,
        drafter=halves.directory,
        dtype="float32",
        device="cpu",
        slots=SLOTS,
        max_length=256,
    )


REQUESTS = [*greedy_requests(20)[:6], *sampled_requests(20)[8:14]]


@pytest.fixture(scope="module")
def texts(halves: Halves) -> list[tuple[int, ...]]:
    """The uncut model's."""
    uncut = UncutModel(halves.directory, halves.prompts)
    references = [uncut.answer(task) for task in tasks_for(REQUESTS)]
    assert min(reference.gap for reference in references) > MIN_GAP
    return [reference.tokens for reference in references]


@pytest.mark.parametrize(
    ("kind", "draft_length", "lanes", "apart"),
    [
        ("none", 0, 1, False),
        ("ngram", 4, 1, False),
        ("hybrid", "auto", 1, False),
        ("model", 4, 2, True),
        ("hybrid", "auto", 2, True),
    ],
)
def test_a_whole_heads_texts_are_the_uncut_models(
    halves: Halves, texts: list[tuple[int, ...]], kind: DrafterKind, draft_length: int, lanes: int, apart: bool
) -> None:
    outcomes = generate(
        halves,
        tasks_for(REQUESTS),
        drafter(halves, kind),
        draft_length=draft_length,
        concurrency=SLOTS,
        lanes=lanes,
        whole=True,
        drafts_apart=apart,
    )
    assert [outcome.token_ids for outcome in outcomes] == texts


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_a_split_heads_texts_are_the_uncut_models_with_a_drafter_elsewhere(
    halves: Halves, texts: list[tuple[int, ...]], kind: DrafterKind
) -> None:
    ways = [
        generate(
            halves,
            tasks_for(REQUESTS),
            drafter(halves, kind),
            draft_length=4,
            concurrency=SLOTS,
            lanes=3,
            drafts_apart=apart,
        )
        for apart in (True, False)
    ]
    for outcomes in ways:
        assert [outcome.token_ids for outcome in outcomes] == texts
    assert all(outcome.metrics and outcome.metrics.drafted for outcome in ways[0])


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "int8"])
def test_a_narrower_wire_dtype_narrows_what_is_handed_over_too_so_that_any_head_may_take_a_job(
    halves: Halves, wire_dtype: str
) -> None:
    requests = [GenerationRequest(text, None, 0, 24, temperature=0.0) for text in ("one two", "Once upon", "x = 1")]
    whole, split = (
        generate(
            halves,
            tasks_for(requests),
            drafter(halves, "none"),
            draft_length=0,
            concurrency=3,
            wire_dtype=wire_dtype,
            whole=whole,
        )
        for whole in (True, False)
    )
    assert [outcome.token_ids for outcome in whole] == [outcome.token_ids for outcome in split]
