"""P1: drafter, draft length and batch mates change only when a text arrives. Reference: the uncut model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file, save_file

from tasks.generation import GenerationRequest, Outcome
from tests.models import smollm2_directory, tiny_model
from tests.pair import Halves, Reference, UncutModel, generate, tasks_for
from tests.parity import EVERY_WAY, MIN_GAP, PAIRWISE_WAYS, Way, greedy_requests, sampled_requests
from workers.head.drafters import Drafter, make_drafter

SLOTS = 8


class Bench:
    """A cut model, the uncut one, and drafters for it."""

    def __init__(self, directory: Path, shorter: Path, split: int, max_length: int) -> None:
        self.halves = Halves.load(directory, split, slots=SLOTS, max_length=max_length)
        self.uncut = UncutModel(directory, self.halves.prompts)
        self._models = {"model": shorter, "hybrid": shorter, "self": directory}
        self._drafters: dict[str, Drafter] = {}
        self._references: dict[str, Reference] = {}

    def drafter(self, kind: str) -> Drafter:
        if kind not in self._drafters:
            self._drafters[kind] = make_drafter(
                "model" if kind == "self" else kind,  # type: ignore[arg-type]
                target=self.halves.directory,
                drafter=self._models.get(kind),
                dtype="float32",
                device="cpu",
                slots=SLOTS,
                max_length=self.halves.head.max_length,
            )
        return self._drafters[kind]

    def references(self, requests: Sequence[GenerationRequest]) -> list[Reference]:
        """The uncut model's texts; fails if one of them hangs on rounding."""
        for request, task in zip(requests, tasks_for(requests), strict=True):
            if repr(request) not in self._references:
                self._references[repr(request)] = self.uncut.answer(task)
            assert self._references[repr(request)].gap > MIN_GAP, f"not a fair prompt: {request}"
        return [self._references[repr(request)] for request in requests]

    def run(self, requests: Sequence[GenerationRequest], way: Way) -> list[Outcome]:
        return generate(
            self.halves,
            tasks_for(requests),
            self.drafter(way.drafter),
            draft_length=way.draft_length,
            concurrency=way.concurrency,
        )

    def assert_parity(self, requests: Sequence[GenerationRequest], way: Way) -> list[Outcome]:
        references, outcomes = self.references(requests), self.run(requests, way)
        for request, reference, outcome in zip(requests, references, outcomes, strict=True):
            assert outcome.failure is None, outcome.failure_message
            assert outcome.token_ids == reference.tokens, request
        return outcomes


def shortened_copy(source: Path, target: Path, layers: int) -> Path:
    """A copy of a model that ends after `layers` layers: related to it, seldom of its opinion."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors.update(load_file(file))
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers
    }
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("tiny")
    directory = tiny_model(root / "target", "llama", layers=4)
    return Bench(directory, shortened_copy(directory, root / "short", 2), split=2, max_length=256)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = smollm2_directory()
    shorter = shortened_copy(directory, tmp_path_factory.mktemp("smollm2") / "short", 12)
    return Bench(directory, shorter, split=15, max_length=256)


def _name(way: Way) -> str:
    return f"{way.drafter}-K{way.draft_length}-c{way.concurrency}"


def _ways(ways: Sequence[Way], kept: Callable[[Way], bool]) -> list[ParameterSet]:
    """`ways` as parameters; those not kept are left to `make parity`."""
    return [pytest.param(way, marks=() if kept(way) else pytest.mark.slow, id=_name(way)) for way in ways]


def _is_telling(way: Way) -> bool:
    """Every drafter with every draft length, eight jobs at a time; one at a time with two of them."""
    return way.concurrency == 8 or (way in PAIRWISE_WAYS and way.drafter in ("model", "hybrid"))


@pytest.mark.parametrize("way", _ways(EVERY_WAY, _is_telling))
def test_a_tiny_models_texts_are_the_uncut_models_whichever_way_they_are_made(tiny: Bench, way: Way) -> None:
    tiny.assert_parity(greedy_requests(24)[:8], way)
    tiny.assert_parity(sampled_requests(24)[8:16], way)


@pytest.mark.parametrize("way", _ways(PAIRWISE_WAYS, lambda way: way.draft_length == 4 and way.concurrency == 8))
def test_smollm2s_texts_are_the_uncut_models_whichever_way_they_are_made(smollm2: Bench, way: Way) -> None:
    smollm2.assert_parity([*greedy_requests(16)[:2], *sampled_requests(16)[3:5]], way)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", EVERY_WAY, ids=_name)
def test_24_prompts_of_64_tokens_on_smollm2_are_the_uncut_models_whichever_way_they_are_made(
    smollm2: Bench, way: Way
) -> None:
    smollm2.assert_parity(greedy_requests(64), way)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", EVERY_WAY, ids=_name)
def test_24_sampled_texts_of_64_tokens_on_smollm2_are_the_uncut_models_whichever_way_they_are_made(
    smollm2: Bench, way: Way
) -> None:
    smollm2.assert_parity(sampled_requests(64), way)


def test_other_seeds_give_other_texts(tiny: Bench) -> None:
    way = Way("ngram", 4, 8)
    first, second = (tiny.run(sampled_requests(32, first_seed=seed), way) for seed in (100, 500))
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_the_target_as_its_own_drafter_is_accepted_to_the_last_token_of_every_round(
    tiny: Bench, draft_length: int
) -> None:
    """A hole in the drafter's cache after a fully accepted round would show here first."""
    rounds = 3
    requests = [
        replace(request, max_tokens=1 + rounds * (draft_length + 1), ignore_eos=True)
        for request in (greedy_requests(1) + sampled_requests(1))
    ]
    for outcome in tiny.run(requests, Way("self", draft_length, 8)):
        assert outcome.metrics is not None
        assert (outcome.metrics.rounds, outcome.metrics.tokens_per_round) == (rounds, draft_length + 1)
        assert outcome.metrics.accepted == outcome.metrics.drafted == rounds * draft_length


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_size_of_prefill_chunks_does_not_change_a_text(tiny: Bench, chunk: int) -> None:
    requests = greedy_requests(16)[:6]
    outcomes = generate(
        tiny.halves, tasks_for(requests), tiny.drafter("ngram"), draft_length=4, concurrency=3, prefill_chunk=chunk
    )
    assert [outcome.token_ids for outcome in outcomes] == [r.tokens for r in tiny.references(requests)]


def test_rows_on_two_lanes_do_not_mix(tiny: Bench) -> None:
    requests = [*greedy_requests(24), *sampled_requests(24)]
    outcomes = generate(tiny.halves, tasks_for(requests), tiny.drafter("model"), draft_length=4, concurrency=7, lanes=2)
    assert [outcome.token_ids for outcome in outcomes] == [r.tokens for r in tiny.references(requests)]
