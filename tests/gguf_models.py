"""Tiny GGUF files for tests, written from model directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from workers.engine.gguf import ARCHITECTURES, NAMES

#: tokens beyond single bytes; whether digits are split shows in the first
MERGED = ("12", "ab")
TO_GGUF = {name: part for part, name in NAMES.items()}


#: ids by role, as `tokenizer.ggml.<role>_token_id`
SPECIAL = {"bos": 256, "eos": 258, "padding": 256}


def write_gguf(
    path: Path,
    directory: Path,
    *,
    pre: str = "smollm",
    special: Mapping[str, int] = SPECIAL,
    add_bos: bool | None = None,
    tensors_per_part: int = 0,
    **fields: Any,
) -> Path:
    """Write the model in `directory`, unquantised, as GGUF; `fields` replace or add metadata strings.

    With `tensors_per_part` as a split file: `path` is then what its parts are named after.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"], split_max_tensors=tensors_per_part)
    _add_sizes(writer, config)
    _add_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text()), pre)
    for role, number in special.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), _reordered(name, tensor.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem in TO_GGUF:
        return f"{TO_GGUF[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{TO_GGUF[rest]}.{kind}"


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], pre: str) -> None:
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = [*sorted(ids, key=ids.__getitem__), *MERGED]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(token) for token in MERGED])
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _reordered(name: str, weights: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Llama's query and key rows as GGUF stores them: rotated pairs beside each other."""
    if not ARCHITECTURES[config["model_type"]][1] or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weights
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
