"""Dummy weights: a model without a checkpoint whose texts are known beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.generation import GenerationRequest
from tests.models import VOCABULARY, byte_tokenizer, tiny_config, tiny_model
from tests.pair import MAX_QUERY, Halves, generate, tasks_for
from workers.engine.fingerprint import fingerprint
from workers.engine.loader import load_head, load_tail, load_whole
from workers.engine.source import Part, resolve
from workers.engine.tokenizer import load_tokenizer
from workers.head.drafters.model import ModelDrafter
from workers.head.drafters.none import NoDrafter
from workers.head.prompts import PromptReader

SIZES = {"slots": 2, "max_length": 128, "max_query": MAX_QUERY, "load_format": "dummy"}


def described(directory: Path, *, tied: bool = False) -> Path:
    """A model directory without weights."""
    tiny_config("qwen2", tied=tied).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def halves(directory: Path) -> Halves:
    head = load_head(directory, 2, **SIZES)
    prompts = PromptReader(load_tokenizer(directory), eos=(), vocab_size=head.vocab_size, context=128)
    return Halves(directory, head, load_tail(directory, 2, **SIZES), prompts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_token_follows_the_one_before_it_also_around_the_end_of_the_vocabulary(
    tmp_path: Path, temperature: float
) -> None:
    request = GenerationRequest((3, VOCABULARY - 4), None, 7, 12, temperature=temperature, ignore_eos=True)
    (outcome,) = generate(halves(described(tmp_path)), tasks_for([request]), NoDrafter(), draft_length=0, concurrency=1)
    assert outcome.token_ids == tuple((VOCABULARY - 3 + i) % VOCABULARY for i in range(12))


def test_a_drafter_with_dummy_weights_drafts_what_such_a_target_says(tmp_path: Path) -> None:
    directory = described(tmp_path)
    request = GenerationRequest((40, 41), None, 7, 20, temperature=0.0, ignore_eos=True)
    drafter = ModelDrafter(load_whole(directory, **SIZES), num_tokens=VOCABULARY)
    (outcome,) = generate(halves(directory), tasks_for([request]), drafter, draft_length=4, concurrency=1)
    assert outcome.token_ids == tuple(range(42, 62))
    assert outcome.metrics is not None
    assert outcome.metrics.accepted == outcome.metrics.drafted > 0


def test_with_tied_embeddings_a_token_repeats(tmp_path: Path) -> None:
    request = GenerationRequest((40, 41), None, 7, 5, temperature=0.0, ignore_eos=True)
    pair = halves(described(tmp_path, tied=True))
    (outcome,) = generate(pair, tasks_for([request]), NoDrafter(), draft_length=0, concurrency=1)
    assert outcome.token_ids == (41,) * 5


def test_dummy_weights_are_no_zeros_and_the_same_each_time(tmp_path: Path) -> None:
    directory = described(tmp_path)
    states = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0]), torch.tensor([0])
    first, second = (load_head(directory, 2, **SIZES).forward(*states) for _ in range(2))
    assert torch.equal(first, second)
    assert first.std() > 0.1


def test_a_model_with_dummy_weights_is_never_taken_for_the_real_one(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "real")
    assert fingerprint(directory) != fingerprint(directory, dummy=True)


def test_of_a_hub_model_with_dummy_weights_no_weight_file_is_fetched(tmp_path: Path) -> None:
    directory, asked = described(tmp_path), []

    def download(repo: str, revision: str | None, patterns: object) -> Path:
        asked.append(patterns)
        return directory

    assert resolve("owner/name", Part.DESCRIPTION, download=download).path == directory
    assert len(asked) == 1
