"""A quantised half is the library's quantised model, cut; and what it takes is counted."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny_model
from tests.pair import uncut_model
from workers.engine import checkpoint
from workers.engine.loader import load_head, load_tail, load_whole
from workers.engine.quantization import Quantization
from workers.engine.shard import Half
from workers.errors import ModelDamaged, ModelUnsupported

CAPACITY: dict[str, Any] = {"slots": 2, "max_length": 32, "max_query": 8}
KINDS: tuple[Quantization, ...] = ("nf4", "int8")
FAMILIES = ("llama", "qwen2", "phi3", "gemma2", "cohere")
SPLIT = 1


def stored(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a module by name, those of its quantised weights' states included."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def layer_parts(half: Half) -> list[dict[str, torch.Tensor]]:
    return [stored(layer) for layer in half._base.layers]


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_half_is_bit_for_bit_what_the_library_makes_of_its_layers(
    tmp_path: Path, family: str, quantization: Quantization
) -> None:
    directory = tiny_model(tmp_path, family)
    theirs = [stored(layer) for layer in uncut_model(directory, quantization).model.layers]
    head = load_head(directory, SPLIT, **CAPACITY, quantization=quantization)
    tail = load_tail(directory, SPLIT, **CAPACITY, quantization=quantization)
    mine = [*layer_parts(head), *layer_parts(tail)]
    assert len(mine) == len(theirs)
    for my_layer, their_layer in zip(mine, theirs, strict=True):
        assert my_layer.keys() == their_layer.keys()
        assert any("absmax" in name or "SCB" in name for name in my_layer)
        for name, tensor in my_layer.items():
            assert tensor.dtype == their_layer[name].dtype
            assert torch.equal(tensor, their_layer[name]), name


@pytest.mark.parametrize("quantization", KINDS)
def test_embeddings_norms_and_lm_head_stay_in_the_dtype(tmp_path: Path, quantization: Quantization) -> None:
    whole = load_whole(tiny_model(tmp_path), dtype="bfloat16", **CAPACITY, quantization=quantization)
    assert whole.dtype is torch.bfloat16
    assert type(whole._lm_head) is torch.nn.Linear
    kept = {name: each.dtype for name, each in whole._base.named_parameters() if each.is_floating_point()}
    linears = {name for name, each in whole._base.named_parameters() if each.dtype in (torch.uint8, torch.int8)}
    assert set(kept.values()) == {torch.bfloat16}
    assert all(name == "embed_tokens.weight" or "norm" in name for name in kept)
    assert len(linears) == 4 * 7
    assert load_tail(tmp_path, SPLIT, dtype="bfloat16", **CAPACITY, quantization=quantization).dtype is torch.bfloat16


@pytest.mark.parametrize("quantization", KINDS)
def test_what_other_rows_hold_changes_no_bit_of_a_quantised_rows_layers(
    tmp_path: Path, quantization: Quantization
) -> None:
    head = load_head(tiny_model(tmp_path), 3, **CAPACITY, quantization=quantization)
    slots, starts = torch.tensor([0, 1]), torch.tensor([0, 0])
    beside = [head.forward(torch.tensor([[5, 6, 7], [other] * 3]), slots, starts)[0] for other in (1, 200, 258)]
    assert torch.equal(beside[0], beside[1])
    assert torch.equal(beside[0], beside[2])


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_quantised_half_are_those_of_all_its_tensors(
    tmp_path: Path, quantization: Quantization, dtype: str
) -> None:
    tail = load_tail(tiny_model(tmp_path), SPLIT, dtype=dtype, **CAPACITY, quantization=quantization)
    names = ("quant_state", "weight_format")  # a description as JSON, not a tensor in memory
    tensors = {name: each for name, each in stored(tail._base).items() if not any(part in name for part in names)}
    expected = sum(tensor.nbytes for tensor in tensors.values()) + tail._lm_head.weight.nbytes
    assert tail.num_weight_bytes == expected
    tail.forward(torch.zeros(1, 2, 48, dtype=tail.dtype), torch.tensor([0]), torch.tensor([0]))
    assert tail.num_weight_bytes == expected  # the library moves scales about when a layer first runs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_quantised_half_is_the_same_on_a_cpu_that_multiplies_bfloat16_itself(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path)
    results = []
    for multiplies in (True, False):
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda answer=multiplies: answer)
        head = load_head(tmp_path, 2, dtype=dtype, **CAPACITY, quantization="nf4")
        hidden = head.forward(torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([0, 1]), torch.tensor([0, 0]))
        results.append((hidden, stored(head._base)))
    (one, weights), (other, other_weights) = results
    assert torch.equal(one, other)
    assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("load", [load_head, load_tail])
def test_of_what_is_to_be_quantised_one_tensor_is_held_at_a_time(
    tmp_path: Path, load: Callable[..., Half], quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, alive = checkpoint.read_tensors, [0]

    def watched(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        given: list[weakref.ref[torch.Tensor]] = []
        for name, tensor in read(*arguments):
            yield name, tensor
            if "proj" in name:
                given.append(weakref.ref(tensor))
            del tensor
            alive.append(sum(reference() is not None for reference in given))

    monkeypatch.setattr(checkpoint, "read_tensors", watched)
    load(tiny_model(tmp_path), 2, **CAPACITY, quantization=quantization)
    assert len(alive) > 2 * 7
    assert max(alive) == 1  # the loop that fills the places holds the last one


def test_a_tensor_of_another_shape_is_named_in_a_quantised_model_too(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ModelDamaged, match=r"up_proj\.weight has shape \[3, 3\]"):
        load_head(directory, SPLIT, **CAPACITY, quantization="nf4")


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it fails
    directory = tiny_model(tmp_path)
    load_head(directory, SPLIT, **CAPACITY)
    with pytest.raises(ModelUnsupported, match=r"nf4 weights need bitsandbytes: pip install 'shardq\[gpu\]'"):
        load_head(directory, SPLIT, **CAPACITY, quantization="nf4")
