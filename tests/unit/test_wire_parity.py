"""P1 with narrower hidden states: the text is that of the uncut model narrowed at the cut, however it is made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.generation import FailureType, GenerationRequest
from tests.models import tiny_model
from tests.pair import Halves, Reference, UncutModel, generate, tasks_for
from tests.parity import Way, greedy_requests, sampled_requests
from workers.engine.tensors import from_wire, to_wire
from workers.head.drafters import Drafter, make_drafter

SPLIT, SLOTS = 2, 8
#: rounding in another shape can move a value of a hidden state to the next level of int8: prompts that hang on less
#: than a few of those are no test
MIN_GAP = 0.02
NARROW = ("int8", "float16", "bfloat16")
#: "self" is the target as its own drafter
WAYS = (Way("none", 0, 1), Way("ngram", 4, 1), Way("self", 4, 8))


class NarrowedModel(UncutModel):
    """The uncut model, its hidden states narrowed and widened again where it would be cut."""

    def __init__(self, halves: Halves, wire_dtype: str) -> None:
        super().__init__(halves.directory, halves.prompts)

        def narrow(_: Any, __: Any, hidden: torch.Tensor) -> torch.Tensor:
            rows = from_wire(to_wire(hidden.flatten(0, 1), wire_dtype), dtype=hidden.dtype, device=hidden.device)
            return rows.view_as(hidden)

        self._model.model.layers[SPLIT - 1].register_forward_hook(narrow)


class Bench:
    """A cut model, and what it says with each wire dtype."""

    def __init__(self, directory: Path) -> None:
        self.halves = Halves.load(directory, SPLIT, slots=SLOTS, max_length=256)
        self._references: dict[str, list[tuple[GenerationRequest, Reference]]] = {}

    def fair(self, wire_dtype: str) -> list[tuple[GenerationRequest, Reference]]:
        """Requests whose text does not hang on rounding, with that text."""
        if wire_dtype not in self._references:
            model, requests = (
                NarrowedModel(self.halves, wire_dtype),
                [*greedy_requests(16)[:8], *sampled_requests(16)[8:16]],
            )
            answers = [model.answer(task) for task in tasks_for(requests)]
            self._references[wire_dtype] = [
                (request, answer) for request, answer in zip(requests, answers, strict=True) if answer.gap > MIN_GAP
            ]
        return self._references[wire_dtype]

    def run(self, requests: Sequence[GenerationRequest], way: Way, wire_dtype: str) -> list[tuple[int, ...]]:
        outcomes = generate(
            self.halves,
            tasks_for(requests),
            drafter(self.halves, way.drafter),
            draft_length=way.draft_length,
            concurrency=way.concurrency,
            wire_dtype=wire_dtype,
        )
        return [outcome.token_ids for outcome in outcomes]


def drafter(halves: Halves, kind: str) -> Drafter:
    return make_drafter(
        "model" if kind == "self" else kind,  # type: ignore[arg-type]
        target=halves.directory,
        drafter=halves.directory if kind == "self" else None,
        dtype="float32",
        device="cpu",
        slots=SLOTS,
        max_length=halves.head.max_length,
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    "wire_dtype", [pytest.param(name, marks=pytest.mark.slow) if name == "float16" else name for name in NARROW]
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.drafter}-K{way.draft_length}-c{way.concurrency}")
def test_speculative_and_plain_texts_are_those_of_the_uncut_model_narrowed_at_the_cut(
    bench: Bench, way: Way, wire_dtype: str
) -> None:
    requests, references = zip(*bench.fair(wire_dtype), strict=True)
    assert len(requests) >= 8
    assert bench.run(requests, way, wire_dtype) == [reference.tokens for reference in references]


def test_int8_changes_texts(bench: Bench) -> None:
    """Else the tests above would prove nothing."""
    requests = greedy_requests(16)[:8]
    assert bench.run(requests, WAYS[0], "int8") != bench.run(requests, WAYS[0], "float32")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_job_with_nan_hidden_states_fails_alone_with_int8_on_the_wire(tmp_path: Path, concurrency: int) -> None:
    directory = tiny_model(tmp_path)
    healthy = Halves.load(directory, SPLIT, slots=SLOTS, max_length=128)
    poisoned = _poisoned(healthy)
    texts = ["good morning", "bad ~ number", "good evening", "~", "good night"]
    requests = [GenerationRequest(text, None, 0, 16, temperature=0.0) for text in texts]
    settings: dict[str, Any] = {"draft_length": 4, "concurrency": concurrency, "wire_dtype": "int8"}
    outcomes = generate(poisoned, tasks_for(requests), drafter(poisoned, "ngram"), **settings)
    expected = generate(healthy, tasks_for(requests), drafter(healthy, "ngram"), **settings)
    for text, outcome, reference in zip(texts, outcomes, expected, strict=True):
        if "~" in text:
            assert outcome.failure is FailureType.NON_FINITE
        else:
            assert outcome.token_ids == reference.token_ids


def _poisoned(halves: Halves) -> Halves:
    """The model again, with an embedding of "~" that is no number."""
    weights = halves.directory / "model.safetensors"
    tensors = load_file(weights)
    (token,) = halves.prompts.tokenizer("~")["input_ids"]
    tensors["model.embed_tokens.weight"][token] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    return Halves.load(halves.directory, SPLIT, slots=SLOTS, max_length=128)
