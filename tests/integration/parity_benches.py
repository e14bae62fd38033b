"""Fixtures: models cut and uncut, with drafters for them, on which ways to make a text are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.generation import GenerationRequest, Outcome
from tests.models import smollm2_directory, tiny_model
from tests.pair import Halves, Reference, UncutModel, generate, tasks_for
from tests.parity import MIN_GAP, Way
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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("tiny")
    directory = tiny_model(root / "target", "llama", layers=4)
    return Bench(directory, shortened_copy(directory, root / "short", 2), split=2, max_length=256)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = smollm2_directory()
    shorter = shortened_copy(directory, tmp_path_factory.mktemp("smollm2") / "short", 12)
    return Bench(directory, shorter, split=15, max_length=256)


def name_of(way: Way) -> str:
    return f"{way.drafter}-K{way.draft_length}-c{way.concurrency}"
