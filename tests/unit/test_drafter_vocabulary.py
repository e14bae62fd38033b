"""A drafter must give every token the id that the target gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import byte_tokenizer, tiny_model
from workers.errors import DrafterInvalid, ModelNotFound, VocabularyMismatch
from workers.head.drafters import check_same_vocabulary, make_drafter
from workers.head.drafters.model import ModelDrafter
from workers.head.drafters.ngram import NgramDrafter
from workers.head.drafters.none import NoDrafter
from workers.head.drafters.vocabulary import differences


def saved(directory: Path, *more: str) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(more))
    tokenizer.save_pretrained(directory)
    return directory


def test_equal_maps_have_no_differences() -> None:
    assert differences({"a": 0, "b": 1}, {"b": 1, "a": 0}) == []


def test_differences_come_lowest_id_first() -> None:
    found = differences({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 2, "d": 1})
    assert found == [
        "'b' is 1 in the target and 2 in the drafter",
        "'d' is missing in the target and 1 in the drafter",
        "'c' is 2 in the target and missing in the drafter",
    ]


def test_equal_tokenizers_pass(tmp_path: Path) -> None:
    check_same_vocabulary(saved(tmp_path / "target"), saved(tmp_path / "drafter"))


def test_a_different_tokenizer_is_refused_by_its_first_differing_tokens(tmp_path: Path) -> None:
    target, drafter = saved(tmp_path / "target", "<one>", "<two>"), saved(tmp_path / "drafter", "<two>")
    with pytest.raises(VocabularyMismatch, match=r"2 tokens differ, first '<one>' is 259 in the target and missing"):
        check_same_vocabulary(target, drafter)


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        check_same_vocabulary(saved(tmp_path / "target"), tmp_path / "nothing")


def test_the_setting_chooses_the_drafter(tmp_path: Path) -> None:
    target = tiny_model(tmp_path / "target", layers=2)
    place = {"target": target, "dtype": "float32", "device": "cpu", "slots": 2, "max_length": 64}
    assert isinstance(make_drafter("none", drafter=None, **place), NoDrafter)
    assert isinstance(make_drafter("ngram", drafter=None, **place), NgramDrafter)
    assert isinstance(make_drafter("model", drafter=target, **place), ModelDrafter)
    with pytest.raises(DrafterInvalid, match="needs a drafter model"):
        make_drafter("model", drafter=None, **place)
    with pytest.raises(VocabularyMismatch):
        make_drafter("model", drafter=saved(tmp_path / "other", "<more>"), **place)
