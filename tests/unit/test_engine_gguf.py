"""GGUF files: exact weights, a right tokenizer, clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gguf_models import write_gguf
from tests.models import tiny_model
from workers.engine import gguf
from workers.engine.loader import load_config, load_whole
from workers.engine.tokenizer import end_ids, load_tokenizer
from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported


def converted(tmp_path: Path, origin: Path, **fields: Any) -> Path:
    target = tmp_path / "converted"
    target.mkdir()
    gguf.convert(write_gguf(tmp_path / "model.gguf", origin, **fields), target, "ab")
    return target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_is_the_one_that_was_written(tmp_path: Path, family: str, tied: bool) -> None:
    origin = tiny_model(tmp_path / "origin", family, tied=tied)
    directory = converted(tmp_path, origin)
    before, after = load_file(origin / "model.safetensors"), load_file(directory / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    capacity = {"slots": 1, "max_length": 16, "max_query": 16}
    where = (torch.tensor([[1, 2, 3, 4]]), torch.tensor([0]), torch.tensor([0]))
    expected, found = (load_whole(path, **capacity).forward(*where) for path in (origin, directory))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert load_config(directory).tie_word_embeddings is tied
    assert end_ids(directory, load_tokenizer(directory)) == (256, 258)


def test_large_models_are_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 100_000)
    origin = tiny_model(tmp_path / "origin")
    directory = converted(tmp_path, origin)
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    assert weight_map.keys() == load_file(origin / "model.safetensors").keys()
    load_whole(directory, slots=1, max_length=16, max_query=4)


def test_the_tokenizer_splits_digits_and_adds_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(converted(tmp_path, tiny_model(tmp_path / "origin")))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 258, 256)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab 12<|im_end|>")["input_ids"])
    assert tokens == ["ab", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        ({"eos": 256}, [256, 258]),  # a base model's end of text; only its name tells the end of a turn
        ({"eos": 258}, [256, 258]),
        ({"eos": 256, "eot": 5, "eom": 7}, [5, 7, 256, 258]),
        ({}, [256, 258]),
        ({"eos": 258, "unknown": 256}, [258]),  # a token for what the vocabulary lacks is no end by its name
        ({"eos": 256, "unknown": 256}, [256, 258]),
        ({"eos": 70_000}, [256, 258]),
    ],
)
def test_texts_end_at_every_token_that_metadata_or_names_call_an_end(
    tmp_path: Path, special: Mapping[str, int], ends: list[int]
) -> None:
    directory = converted(tmp_path, tiny_model(tmp_path / "origin"), special=special)
    assert list(end_ids(directory, load_tokenizer(directory))) == ends


def test_a_word_of_the_vocabulary_is_no_end_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gguf_models.MERGED", ("12", "<|eot_id|>"))
    file = gguf.GGUFFile.open(write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "origin")))
    assert "<|eot_id|>" in file.tokens
    assert gguf.end_ids(file) == [256, 258]


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama3", None, True),
        ("llama-v3", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("gpt-2", None, False),
        ("smollm", None, False),
        ("qwen2", True, True),
    ],
)
def test_prompts_begin_with_bos_where_the_file_or_its_kind_of_tokenizer_says_so(
    tmp_path: Path, pre: str, add_bos: bool | None, begins: bool
) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "origin"), pre=pre, add_bos=add_bos)
    ids = gguf.build_tokenizer(gguf.GGUFFile.open(file))("hi")["input_ids"]
    assert (ids[0] == 256) is begins
    assert len(ids) == 2 + begins


def test_a_file_that_wants_bos_and_has_none_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "origin"), special={"eos": 258}, add_bos=True)
    with pytest.raises(ModelDamaged, match="wants BOS before every text and names no token for it"):
        gguf.build_tokenizer(gguf.GGUFFile.open(file))


@pytest.mark.parametrize("number", [1, 3])
def test_a_split_file_is_joined_from_any_of_its_parts(tmp_path: Path, number: int) -> None:
    origin = tiny_model(tmp_path / "origin")
    write_gguf(tmp_path / "big.gguf", origin, tensors_per_part=15)
    assert not (tmp_path / "big.gguf").exists()
    target = tmp_path / "converted"
    target.mkdir()
    gguf.convert(tmp_path / f"big-{number:05}-of-00003.gguf", target, "ab")
    before, after = load_file(origin / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_config(target).tie_word_embeddings is False  # what unties them is in another part than the embeddings


def test_an_absent_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "big.gguf", tiny_model(tmp_path / "origin"), tensors_per_part=15)
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"big-00002-of-00003\.gguf is missing: .* is one of 3 parts$"):
        gguf.GGUFFile.open(tmp_path / "big-00001-of-00003.gguf")


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "big.gguf", tiny_model(tmp_path / "origin"), tensors_per_part=15)
    first, second, third = (tmp_path / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    alone = Path(shutil.copy(first, tmp_path / "big.gguf"))
    with pytest.raises(ModelDamaged, match=r"one of 3 parts, .* expected big-00001-of-00003\.gguf"):
        gguf.GGUFFile.open(alone)
    shutil.copy(second, third)
    with pytest.raises(ModelDamaged, match=r"00003\.gguf says that it is part 2"):
        gguf.GGUFFile.open(first)


def test_parts_of_different_models_are_not_joined(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a" / "big.gguf", tiny_model(tmp_path / "three"), tensors_per_part=15)
    write_gguf(tmp_path / "b" / "big.gguf", tiny_model(tmp_path / "other", layers=4, tied=True), tensors_per_part=14)
    shutil.copy(tmp_path / "b" / "big-00002-of-00003.gguf", tmp_path / "a")
    with pytest.raises(ModelDamaged, match="are of different models"):
        gguf.GGUFFile.open(tmp_path / "a" / "big-00001-of-00003.gguf")


def test_a_file_without_all_layers_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    origin = tiny_model(tmp_path / "origin")
    tensors = load_file(origin / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name and ".layers.3." not in name}
    save_file(kept, origin / "model.safetensors")
    with pytest.raises(ModelDamaged, match=r"lacks 18 tensors of layers 2 to 3, first model\.layers\.2\."):
        converted(tmp_path, origin)
    assert not list((tmp_path / "converted").glob("*.safetensors"))


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.05])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, kept: float) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "origin"))
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ModelDamaged, match="cut off"):
        gguf.GGUFFile.open(file)


def test_unknown_architectures_and_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    origin = tiny_model(tmp_path / "origin")
    file = write_gguf(tmp_path / "model.gguf", origin, pre="klingon")
    with pytest.raises(
        ModelUnsupported,
        match="'klingon' is not supported; supported: gpt-2, llama-bpe, llama-v3, llama3, qwen2, smollm",
    ):
        gguf.build_tokenizer(gguf.GGUFFile.open(file))
    scaled = write_gguf(tmp_path / "scaled.gguf", origin, llama__rope__scaling__type="yarn")
    with pytest.raises(ModelUnsupported, match="scales positions"):
        gguf.model_config(gguf.GGUFFile.open(scaled))


def test_an_architecture_outside_the_list_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match="'mamba' is not supported; supported: llama, qwen2, qwen3"):
        gguf.model_config(gguf.GGUFFile.open(tmp_path / "model.gguf"))


def test_a_file_that_is_no_gguf_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"something else entirely, long enough to be read as a header")
    with pytest.raises(ModelDamaged, match="not a readable GGUF"):
        gguf.GGUFFile.open(file)
