"""Computations as a GPU records them, run here without recording: buckets, padding and buffers change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.generation import GenerationRequest, Outcome
from tests.models import EOS_ID, tiny_model
from tests.pair import Halves, generate, tasks_for
from tests.parity import greedy_requests, processed_requests, sampled_requests
from workers.head.drafters import Drafter, make_drafter

SLOTS = 5
LENGTH = 200


class Way:
    """A pair of halves and a drafter, recorded or not."""

    def __init__(self, directory: Path, *, graphs: bool) -> None:
        self.halves = Halves.load(directory, 2, slots=SLOTS, max_length=LENGTH, graphs=graphs)
        self.drafter: Drafter = make_drafter(
            "model",
            target=directory,
            drafter=directory,
            dtype="float32",
            device="cpu",
            slots=SLOTS,
            max_length=LENGTH,
            graphs=graphs,
        )

    def run(self, requests: Sequence[GenerationRequest], draft_length: int) -> list[Outcome]:
        return generate(
            self.halves, tasks_for(requests), self.drafter, draft_length=draft_length, concurrency=SLOTS, lanes=2
        )


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Way, Way]:
    directory = tiny_model(tmp_path_factory.mktemp("model"), "qwen2", window=20)
    return Way(directory, graphs=False), Way(directory, graphs=True)


REQUESTS = {
    "greedy": greedy_requests(12)[:8],
    "sampled": sampled_requests(12)[:8],
    "processed": processed_requests(12, eos=EOS_ID, common=(101, 116, 97, 111, 110, 105)),
}


@pytest.mark.parametrize("draft_length", [0, 3])
@pytest.mark.parametrize("kind", REQUESTS)
def test_texts_and_logprobs_are_those_of_the_plain_way(ways: tuple[Way, Way], kind: str, draft_length: int) -> None:
    plain, recorded = (way.run(REQUESTS[kind], draft_length) for way in ways)

    assert [outcome.token_ids for outcome in recorded] == [outcome.token_ids for outcome in plain]
    for one, other in zip(recorded, plain, strict=True):
        assert [each.chosen.logprob for each in one.logprobs] == pytest.approx(
            [each.chosen.logprob for each in other.logprobs], abs=1e-4
        )


def test_what_reads_tables_is_recorded_for_those_that_there_are(ways: tuple[Way, Way]) -> None:
    """A recording holds the addresses of the tables that there were: of these, not of others, and not of fewer."""
    way = Way(ways[0].halves.directory, graphs=True)  # the others' may be full
    prompt = greedy_requests(6)[0]
    graphs = way.halves.tail.graphs
    assert graphs is not None
    numbers = []
    for penalty in ({"presence_penalty": 1.0}, {"repetition_penalty": 2.0}):
        way.run([replace(prompt, **penalty)], 0)  # type: ignore[arg-type]
        numbers.append(len(graphs))

    assert numbers[1] > numbers[0]


def test_shapes_are_recorded_once(ways: tuple[Way, Way]) -> None:
    _, way = ways
    head = way.halves.head.graphs
    assert head is not None
    way.run(greedy_requests(12)[:5], 3)
    number = len(head)

    way.run(greedy_requests(12)[5:10], 3)

    assert len(head) == number
