"""What a half holds, and what the loader refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from tests.models import EOS_ID, tiny_config, tiny_model
from workers.engine.checkpoint import tensor_files
from workers.engine.families import shorten
from workers.engine.loader import context_length, load_config, load_head, load_tail, load_whole
from workers.engine.tokenizer import load_tokenizer
from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported, SplitInvalid

CAPACITY: dict[str, Any] = {"slots": 2, "max_length": 32, "max_query": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model that the test may damage."""
    return tiny_model(tmp_path / "model")


def change_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_weights(directory: Path, **values: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): value for name, value in values.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def parameters(half: Any) -> dict[str, torch.Tensor]:
    return dict(half._base.named_parameters())


def test_a_head_holds_embeddings_and_its_layers_only(llama: Path) -> None:
    names = set(parameters(load_head(llama, 1, **CAPACITY)))
    assert "embed_tokens.weight" in names
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0"}
    assert "norm.weight" not in names


def test_a_tail_holds_its_layers_and_the_norm_but_no_embeddings(llama: Path) -> None:
    names = set(parameters(load_tail(llama, 1, **CAPACITY)))
    assert "embed_tokens.weight" not in names
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1", "2"}
    assert "norm.weight" in names


def test_a_whole_model_with_tied_embeddings_holds_them_once(tmp_path: Path) -> None:
    whole = load_whole(tiny_model(tmp_path, tied=True), **CAPACITY)
    assert whole._lm_head.weight.data_ptr() == parameters(whole)["embed_tokens.weight"].data_ptr()


def test_a_tied_checkpoint_that_names_the_tensor_after_the_lm_head_loads(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, tied=True)
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    change_weights(directory, model__embed_tokens__weight=None, lm_head__weight=embeddings)
    assert torch.equal(parameters(load_head(directory, 2, **CAPACITY))["embed_tokens.weight"], embeddings)
    assert torch.equal(load_tail(directory, 2, **CAPACITY)._lm_head.weight, embeddings)


def test_a_tied_config_does_not_hide_a_stored_lm_head_of_its_own(own: Path) -> None:
    change_config(own, tie_word_embeddings=True)
    stored = load_file(own / "model.safetensors")
    whole = load_whole(own, **CAPACITY)
    assert torch.equal(whole._lm_head.weight, stored["lm_head.weight"])
    assert torch.equal(parameters(whole)["embed_tokens.weight"], stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
])  # fmt: skip
def test_buffers_that_no_checkpoint_holds_are_those_of_the_uncut_model(own: Path, rope: dict[str, Any]) -> None:
    change_config(own, rope_parameters=rope)
    theirs = dict(AutoModelForCausalLM.from_pretrained(own).model.named_buffers())
    mine = dict(load_tail(own, 3, **CAPACITY)._base.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, buffer in mine.items():
        assert torch.equal(buffer, theirs[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_cast_to_the_dtype_asked_for(llama: Path, dtype: str) -> None:
    head = load_head(llama, 2, dtype=dtype, **CAPACITY)
    tail = load_tail(llama, 2, dtype=dtype, **CAPACITY)
    hidden = head.forward(torch.tensor([[5, 6]]), torch.tensor([0]), torch.tensor([0]))
    assert head.dtype == hidden.dtype == getattr(torch, dtype)
    normed = tail.forward(hidden, torch.tensor([0]), torch.tensor([0]))
    assert tail.logits(normed[:, -1]).dtype == torch.float32
    stored = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(parameters(head)["embed_tokens.weight"], stored.to(head.dtype))


def test_a_checkpoint_in_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    file = directory / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(halves, file)
    head = load_head(directory, 2, **CAPACITY)
    assert torch.equal(parameters(head)["embed_tokens.weight"], halves["model.embed_tokens.weight"].float())


def test_tensors_larger_than_one_read_arrive_whole(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.checkpoint.PIECE_BYTES", 4096)
    stored = load_file(llama / "model.safetensors")
    head = load_head(llama, 2, **CAPACITY)
    for name, parameter in parameters(head).items():
        assert torch.equal(parameter, stored[f"model.{name}"])


def test_every_list_with_one_entry_per_layer_is_sliced() -> None:
    config = tiny_config("gemma2", layers=5, window=8)
    config.no_rope_layers = [1, 0, 1, 0, 1]
    config.eos_token_id = [1, 2, 3, 4, 5]
    short = shorten(config, 1, 4)
    assert short.num_hidden_layers == 3
    assert short.layer_types == config.layer_types[1:4]
    assert short.no_rope_layers == [0, 1, 0]
    assert short.eos_token_id == [1, 2, 3, 4, 5]
    assert config.num_hidden_layers == len(config.layer_types) == 5


def test_the_text_half_of_a_multimodal_checkpoint_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = tiny_config("gemma3_text", tied=True, window=8).to_dict()
    full = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    full.save_pretrained(tmp_path)
    tokens = torch.tensor([list(b"some text")])
    where = (torch.tensor([0]), torch.tensor([0]))
    capacity = {"slots": 2, "max_length": 32, "max_query": 16}
    head, tail = load_head(tmp_path, 2, **capacity), load_tail(tmp_path, 2, **capacity)
    mine = tail.logits(tail.forward(head.forward(tokens, *where), *where)[0])
    with torch.inference_mode():
        theirs = full.eval()(input_ids=tokens).logits[0]
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_a_type_that_is_not_proven_is_refused_with_those_that_are(own: Path) -> None:
    change_config(own, model_type="gpt2")
    with pytest.raises(ModelUnsupported, match=r"'gpt2' is not supported; supported: .*llama.*qwen3"):
        load_config(own)


def test_a_type_that_the_library_does_not_know_is_refused_in_one_line(own: Path) -> None:
    change_config(own, model_type="no-such-type", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(ModelUnsupported, match="'no-such-type' is not supported") as caught:
        load_config(own)
    assert "\n" not in str(caught.value)


def test_quantised_weights_are_refused(own: Path) -> None:
    change_config(own, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelUnsupported, match="quantised"):
        load_config(own)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere does not exist"):
        load_head(tmp_path / "nowhere", 1, **CAPACITY)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_head(tmp_path, 1, **CAPACITY)


def test_pickled_weights_are_refused(own: Path) -> None:
    (own / "model.safetensors").rename(own / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="safetensors"):
        load_head(own, 1, **CAPACITY)


@pytest.mark.parametrize("split", [-1, 0, 4, 5])
def test_a_split_that_leaves_a_half_empty_is_refused(llama: Path, split: int) -> None:
    for load in (load_head, load_tail):
        with pytest.raises(SplitInvalid, match="between 1 and 3"):
            load(llama, split, **CAPACITY)


def test_a_missing_tensor_is_named(own: Path) -> None:
    change_weights(own, model__layers__3__mlp__up_proj__weight=None)
    load_head(own, 2, **CAPACITY)
    with pytest.raises(ModelDamaged, match=r"lacks 1 tensors of layer 3, first model\.layers\.3\.mlp\.up_proj\.weight"):
        load_tail(own, 2, **CAPACITY)


def test_a_missing_lm_head_is_an_error_unless_tied(own: Path) -> None:
    change_weights(own, lm_head__weight=None)
    with pytest.raises(ModelDamaged, match="does not tie"):
        load_tail(own, 2, **CAPACITY)


def test_a_tensor_of_another_shape_is_named(own: Path) -> None:
    change_weights(own, model__layers__0__mlp__up_proj__weight=torch.zeros(3, 3))
    with pytest.raises(ModelDamaged, match=r"layers\.0\.mlp\.up_proj\.weight has shape \[3, 3\]"):
        load_head(own, 2, **CAPACITY)


def test_a_cut_off_file_is_damaged(own: Path) -> None:
    file = own / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50_000])
    with pytest.raises(ModelDamaged, match="was cut off"):
        load_whole(own, **CAPACITY)


def longrope(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}


@pytest.mark.parametrize(("rope", "context"), [
    ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 39),
    (longrope(39), 512),
])  # fmt: skip
def test_scaling_that_depends_on_length_is_refused_beyond_the_original_context(
    own: Path, rope: dict[str, Any], context: int
) -> None:
    change_config(own, rope_parameters=rope, max_position_embeddings=context)
    with pytest.raises(ModelUnsupported, match="depends on length beyond 39"):
        load_head(own, 2, slots=1, max_length=32, max_query=8)
    load_head(own, 2, slots=1, max_length=31, max_query=8)


def test_the_context_is_the_models_own(llama: Path) -> None:
    assert context_length(llama) == 512


def test_a_tokenizer_reads_back_what_it_wrote(llama: Path) -> None:
    tokenizer = load_tokenizer(llama)
    text = "naïve 🙂 <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == EOS_ID
    assert tokenizer.decode(ids) == text


def test_a_directory_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises((ModelNotFound, ModelUnsupported)) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ['{"weight_map": {"a', "[]", "{}", '{"weight_map": 5}'])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelDamaged, match=r"index\.json is no index of weights, or was cut off"):
        tensor_files(tmp_path)
